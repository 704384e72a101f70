"""The policy in a closed loop, from a cold start: what it learns and tries is part of the throughput."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import mean

import pytest

from coordinator.acceptance import expected_tokens
from coordinator.pair import Pair
from coordinator.policy import Goodput
from tests.sim.closed_loop import MAX_K, QUICK, ClosedLoop, Machine, constant, text_of_all_kinds

CORES = Machine()
SHARED = Machine(contention=1.6, message=1.5e-4)
"""The workers slow each other down, and the coordinator is slow."""
ACCELERATOR = Machine(
    target_step=20e-3, target_sequence=2e-5, target_row=2e-5, draft_step=2e-3, draft_sequence=1e-5
)
"""Rows cost next to nothing."""
ROUNDS = {1: 1500, 4: 1200, 16: 700, 64: 400}
"""Plain rounds of each sequence that a run lasts."""
SEEDS = {1: 3, 4: 3, 16: 2, 64: 1}
"""Runs that are averaged, for passes are noisy."""
OVER_PLAIN, OVER_FIXED = 0.98, 0.95
NOISE = 0.03
"""What is left of it: where K hardly matters, two means of the same K differ by that much."""


def seconds(machine: Machine, concurrency: int) -> float:
    step = machine.target_step + concurrency * (machine.target_sequence + machine.target_row)
    return ROUNDS[concurrency] * (step + 2 * machine.wire)


@functools.cache
def fixed(machine: Machine, concurrency: int, acceptance: float, k: int) -> float:
    return mean(
        ClosedLoop(machine, concurrency, constant(acceptance), k, seed=seed).run(
            seconds(machine, concurrency)
        )
        for seed in range(SEEDS[concurrency])
    )


def shares(
    machine: Machine, concurrency: int, acceptance: float, make: type[Goodput] = Goodput
) -> Sequence[float]:
    """Tokens per second of the policy over plain decoding, and over the best fixed K."""
    auto = mean(
        ClosedLoop(
            machine, concurrency, constant(acceptance), seed=seed, make=lambda pair: make(pair, MAX_K)
        ).run(seconds(machine, concurrency))
        for seed in range(SEEDS[concurrency])
    )
    # Without drafts it is the same for every acceptance.
    plain = fixed(machine, concurrency, 1.0, 0)
    best = max(plain, *(fixed(machine, concurrency, acceptance, k) for k in (1, 2, 4, MAX_K)))
    return auto / plain, auto / best


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("concurrency", ROUNDS)
@pytest.mark.parametrize("machine", [CORES, SHARED], ids=["cores", "shared"])
def test_hardly_slower_than_plain_decoding_or_the_best_k(
    machine: Machine, concurrency: int, acceptance: float
) -> None:
    over_plain, over_fixed = shares(machine, concurrency, acceptance)
    assert over_plain >= OVER_PLAIN - NOISE
    assert over_fixed >= OVER_FIXED - NOISE


@pytest.mark.parametrize(("concurrency", "acceptance"), [(1, 0.2), (4, 0.95), (16, 0.5), (64, 0.8)])
def test_nor_where_rows_are_free(concurrency: int, acceptance: float) -> None:
    over_plain, over_fixed = shares(ACCELERATOR, concurrency, acceptance)
    assert over_plain >= OVER_PLAIN - NOISE
    assert over_fixed >= OVER_FIXED - NOISE


def test_sequences_that_differ_get_what_suits_each() -> None:
    """No K for all of them is as good."""

    def mixed(number: int, now: float) -> Callable[[int], float]:
        return lambda generated: 0.9 if number % 2 else 0.1

    def rate(k: int | None, seed: int = 0) -> float:
        return ClosedLoop(CORES, 16, mixed, k, tokens=300, seed=seed).run(10.0)

    # A service's first trials decide a run: one differs from the next by a twentieth.
    chosen = mean(rate(None, seed) for seed in range(8))
    assert chosen > 1.05 * max(rate(k) for k in (0, 1, 2, 4, MAX_K))


def of_the_best(concurrency: int) -> float:
    """Tokens per second of the policy over the best fixed K where acceptance goes up and down."""

    def rate(k: int | None) -> float:
        return mean(
            ClosedLoop(QUICK, concurrency, text_of_all_kinds, k, tokens=64, seed=seed).run(8.0)
            for seed in range(4)
        )

    return rate(None) / max(rate(k) for k in (0, 1, 2, 4))


@pytest.mark.parametrize("concurrency", [1, 4, 8, 16])
def test_a_few_lucky_tokens_do_not_raise_hopes(concurrency: int) -> None:
    assert of_the_best(concurrency) >= OVER_FIXED - 1.5 * NOISE


def drafted_late(make: type[Goodput], *, concurrency: int = 1) -> float:
    """Draft tokens per token in the last part of a run in which acceptance recovers half-way."""
    half = seconds(CORES, concurrency)

    def recovering(number: int, now: float) -> Callable[[int], float]:
        return lambda generated: 0.0 if loop.now < half else 0.95

    loop = ClosedLoop(CORES, concurrency, recovering, make=lambda pair: make(pair, MAX_K))
    loop.run(1.7 * half)
    made, drafted = loop.made, loop.drafted
    loop.resume(2 * half)
    return (loop.drafted - drafted) / (loop.made - made)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_draft_that_recovers_is_used_again(concurrency: int) -> None:
    assert drafted_late(Goodput, concurrency=concurrency) > 0.5


def test_without_probes_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(Goodput):
        def _probe(self, lacking: int, seconds: Sequence[float]) -> int:
            return 0

    monkeypatch.setattr("coordinator.trials.WORTH", 2.0)  # nor trials
    assert drafted_late(Never) < 0.1


FAR = Machine(wire=8e-3)


def test_where_drafts_are_far_away_they_are_left_alone() -> None:
    assert shares(FAR, 1, 0.4)[0] >= OVER_PLAIN - NOISE


def test_a_policy_that_forgets_the_wire_is_noticed() -> None:
    class Wireless(Goodput):
        def proposed(self, num_draft: int, seconds: float, lacking: int, prefill: float = 0.0) -> None:
            super().proposed(num_draft, max(0.0, seconds - 2 * FAR.wire), lacking, prefill)

    assert shares(FAR, 1, 0.4, Wireless)[0] < OVER_PLAIN - 2 * NOISE


def test_a_policy_that_does_not_see_the_load_is_noticed() -> None:
    class Greedy(Goodput):
        def _wish(self, expected: Sequence[float], seconds: Sequence[float]) -> int:
            self.pair.agreement.drafts = True
            return max(range(len(expected)), key=expected.__getitem__)

    assert shares(CORES, 64, 0.5, Greedy)[0] < 0.9


def test_a_policy_that_always_tries_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.trials.TRIAL_AGAIN", 6)
    monkeypatch.setattr("coordinator.trials.TRIAL_LAST", 6)
    monkeypatch.setattr("coordinator.trials.WORTH", 0.0)
    assert shares(CORES, 1, 0.8)[1] < OVER_FIXED - 2 * NOISE


def test_the_draft_is_left_alone_where_it_cannot_help() -> None:
    """Every draft pass takes time from the target where they share cores."""
    bound = Machine(target_sequence=5e-5, target_row=2e-3)
    loop = ClosedLoop(bound, 64, constant(0.3), tokens=300)
    loop.run(40.0)
    made, drafted = loop.made, loop.drafted
    loop.resume(80.0)
    assert loop.drafted - drafted < 0.03 * (loop.made - made)


def test_expectations_are_those_of_the_simulation() -> None:
    """The loop itself, against the closed form: one sequence, no noise."""
    machine = Machine(noise=0.0)
    loop = ClosedLoop(machine, 1, constant(0.7), 4, tokens=4000)
    rate = loop.run(60.0)
    target = machine.target_step + machine.target_sequence + 5 * machine.target_row
    draft = 4 * (machine.draft_step + machine.draft_sequence)
    hops = 4 * (machine.wire + machine.message)
    assert rate == pytest.approx(expected_tokens([0.7] * 4)[-1] / (target + draft + hops), rel=0.05)
    assert isinstance(loop.pair, Pair)
