"""Where draft, target and coordinator share cores: passes fall apart unless all sequences do the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from statistics import mean

import pytest

from coordinator.agreement import Agreement
from coordinator.costs import RoundSeconds
from coordinator.pair import Pair
from coordinator.policy import Fixed, Policy
from tests.sim.closed_loop import QUICK, ClosedLoop, Machine, constant, text_of_all_kinds

Acceptance = Callable[[int, float], Callable[[int], float]]

CROWDED = dataclasses.replace(QUICK, target_sequence=6e-4, target_row=1e-4, wire=4e-4, contention=2.5)
"""Fitted to two cores (docs/benchmarks-first-pair.md): one kind of sequence waits while others draft."""
ROOMIER = dataclasses.replace(CROWDED, contention=2.0)
DRIFTING = dataclasses.replace(QUICK, drift=0.5)
"""Others use it as well, for seconds at a time."""
GUSTY = dataclasses.replace(QUICK, gusts=0.2)
"""And for tenths of a second: a trial is over before its time can be told from that of the next one."""
MACHINES = {"crowded": CROWDED, "roomier": ROOMIER, "drifting": DRIFTING, "gusty": GUSTY}
TEXTS: dict[str, Acceptance] = {"all alike": constant(0.65), "of all kinds": text_of_all_kinds}
FROM, TO = 12.6, 31.4
"""Seconds that are measured: whole periods of the drift, after what is tried at the start."""
LEAST = 0.905
"""Share of the best fixed K, 0 among them: 0.95 but for noise."""


def rate(
    machine: Machine,
    concurrency: int,
    text: str,
    k: int | None = None,
    make: Callable[[Pair], Policy] | None = None,
) -> float:
    def once(seed: int) -> float:
        loop = ClosedLoop(machine, concurrency, TEXTS[text], k, prompt=100, seed=seed, make=make)
        loop.run(FROM)
        made, begun = loop.made, loop.now
        loop.resume(TO)
        return (loop.made - made) / (loop.now - begun)

    # What is tried when decides a run: of two seeds the mean moves by 0.03 with any change of timing.
    chooses = k is None and make is None
    return mean(once(seed) for seed in range(3 if chooses else 2))


@functools.cache
def fixed(machine: Machine, concurrency: int, text: str, k: int) -> float:
    return rate(machine, concurrency, text, k)


def plain(machine: Machine, concurrency: int) -> float:
    """Without drafts it is the same for every text."""
    return fixed(machine, concurrency, "all alike", 0)


def best(machine: Machine, concurrency: int, text: str) -> float:
    return max(plain(machine, concurrency), *(fixed(machine, concurrency, text, k) for k in (1, 2, 4)))


def of_the_best(machine: Machine, concurrency: int, text: str) -> float:
    return rate(machine, concurrency, text) / best(machine, concurrency, text)


@pytest.mark.parametrize("concurrency", [4, 16])
def test_half_of_them_drafting_is_worse_than_half_of_each(concurrency: int) -> None:
    """The simulation has the price that was measured."""
    numbers = itertools.count()

    def half(pair: Pair) -> Policy:
        return Fixed(pair, 4 * (next(numbers) % 2))

    alone = [plain(CROWDED, concurrency), fixed(CROWDED, concurrency, "all alike", 4)]
    assert rate(CROWDED, concurrency, "all alike", make=half) < 0.95 * mean(alone)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("concurrency", [2, 4, 16, 32])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_is_hardly_slower_than_the_best_k(machine: Machine, concurrency: int, text: str) -> None:
    assert of_the_best(machine, concurrency, text) >= LEAST


def test_sequences_that_decide_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the K that suits it, and takes plain rounds for as short as where nobody drafts."""

    def revise(self: Agreement, seconds: RoundSeconds) -> None:
        honest(self, dataclasses.replace(seconds, beside=seconds.whole[0]))
        self.drafts = self.rate > 0

    together = [of_the_best(CROWDED, n, "of all kinds") for n in (8, 16)]
    honest = Agreement.revise
    monkeypatch.setattr("coordinator.policy.ALONE", 0.0)
    monkeypatch.setattr(Agreement, "revise", revise)
    alone = [of_the_best(CROWDED, n, "of all kinds") for n in (8, 16)]
    assert mean(alone) < mean(together) - 0.04


def test_old_times_beside_new_ones_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafting and not are close, the one that was measured while all was slower seems worse."""
    loads = (dataclasses.replace(QUICK, drift=1.2), 2), (DRIFTING, 8)

    def made() -> list[float]:
        return [rate(machine, concurrency, text) for machine, concurrency in loads for text in TEXTS]

    with_pace = made()
    monkeypatch.setattr("coordinator.costs.PACE", 0.0)
    assert mean(bad / good for bad, good in zip(made(), with_pace, strict=True)) < 0.99
