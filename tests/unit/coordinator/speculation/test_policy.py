"""What a sequence does with the controller's K, and what the controller learns from its rounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coordinator.proposers.interface import Guess
from coordinator.proposers.prompt_lookup import NAME, PRIOR_RATES, grade_of
from coordinator.speculation.arms import DraftArm
from coordinator.speculation.controller import GUESS_AGAIN, READING, STARVED, Controller, kind_of
from coordinator.speculation.expected_tokens import DepthAcceptance, ReplayedAcceptance
from coordinator.speculation.exploration import Exploration
from coordinator.speculation.policy import (
    CATCH_UP,
    RETRY_FIRST,
    FixedLength,
    GoodputPolicy,
    Policy,
    TablePolicy,
    Verification,
)
from paceline.core.types import AcceptanceMode
from tests.sim.rounds import accepting, chain

MOST = 8


def experienced(plain: float = 0.01, first: float = 0.012, each: float = 0.0005) -> Controller:
    """A controller that has measured every K with 1 to 128 sequences, and begins no trial."""
    controller = Controller(MOST)
    for power in range(8):
        for k in range(MOST + 1):
            for _ in range(50):
                drafting = each * k
                controller.costs.add(DraftArm(k), drafting, first if k else plain, 2**power)
        controller._explorations[power] = Exploration(due=10**9)
    return controller


def run(policy: Policy, acceptance: float, rounds: int, rng: random.Random, *, lacking: int = 0) -> list[int]:
    """K of each round."""
    chosen = []
    for _ in range(rounds):
        k = policy.choose(MOST, lacking, 1000)
        if k:
            policy.on_draft_request(lacking)
            policy.on_proposal(chain(k), 0.0005 * k, lacking)
        policy.on_verify(chain(k), prefills=False)
        accepted = next((i for i in range(k) if rng.random() >= acceptance), k)
        policy.on_verdict(chain(k), accepting(accepted), Verification(0.012 if k else 0.01))
        chosen.append(k)
    return chosen


def test_good_drafts_are_used_and_bad_ones_are_not() -> None:
    good, bad = (GoodputPolicy(experienced(), MOST) for _ in range(2))
    assert run(good, 0.9, 300, random.Random(1))[-1] >= 5
    assert run(bad, 0.05, 300, random.Random(1))[-1] == 0


def test_the_room_bounds_k() -> None:
    controller = experienced()
    policy = GoodputPolicy(controller, MOST)
    run(policy, 0.9, 200, random.Random(1))
    assert policy.choose(3, 0, 1000) == 3


def test_all_sequences_take_one_k() -> None:
    controller = experienced()
    policies = [GoodputPolicy(controller, MOST) for _ in range(8)]
    for policy in policies:
        policy.on_verify(chain(0), prefills=False)
    rng = random.Random(2)
    for _ in range(100):
        for policy in policies:
            run(policy, 0.8, 1, rng)
    # A decision may fall between two of them.
    assert len({policy.choose(MOST, 0, 1000) for policy in policies}) == 1


def test_a_far_worse_sequence_abstains_and_retries() -> None:
    controller = experienced(first=0.016)
    good, bad = GoodputPolicy(controller, MOST), GoodputPolicy(controller, MOST)
    rng = random.Random(3)
    chosen = []
    for _ in range(400):
        run(good, 0.95, 3, rng)
        chosen += run(bad, 0.0, 1, rng)
    assert good.choose(MOST, 0, 1000) > 0
    assert chosen[-RETRY_FIRST:].count(0) > RETRY_FIRST // 2
    starts = [i for i in range(1, 400) if chosen[i] and not chosen[i - 1]]
    assert len(starts) >= 2


def test_catching_up_must_pay_off_in_the_remaining_tokens() -> None:
    controller = experienced()
    policy = GoodputPolicy(controller, MOST)
    run(policy, 0.9, 200, random.Random(1))
    controller.caught_up(1.0, 1000)
    assert policy.choose(MOST, 4000, 10_000) > 0
    assert policy.choose(MOST, 4000, 20) == 0
    assert policy.choose(MOST, CATCH_UP, 20) > 0


def test_a_fixed_k_stays_and_teaches_the_pool() -> None:
    controller = experienced()
    fixed = FixedLength(controller, 4)
    assert set(run(fixed, 0.9, 200, random.Random(1))) == {4}
    expected = GoodputPolicy(controller, MOST).drafts.chain.expected(4)
    assert expected[4] == pytest.approx(4.1, abs=0.3)


@pytest.mark.parametrize(("sequences", "k"), [(1, 5), (4, 5), (5, 3), (16, 3), (17, 0), (100, 0)])
def test_the_table_gives_k_by_load(sequences: int, k: int) -> None:
    controller = experienced()
    table = ((1, 4, 5), (5, 16, 3), (17, 64, 0))
    policies = [TablePolicy(controller, 5, table=table) for _ in range(sequences)]
    for policy in policies:
        policy.on_verify(chain(0), prefills=False)
    assert policies[0].choose(MOST, 0, 1000) == k


@pytest.mark.parametrize("spoil", ["prompt rows", "reading", "another K", "catching up", "sequences"])
def test_disturbed_rounds_are_not_measured(spoil: str) -> None:
    controller = Controller(MOST)
    policy, others = (
        GoodputPolicy(controller, MOST),
        [GoodputPolicy(controller, MOST) for _ in range(READING)],
    )
    k = policy.choose(MOST, 0, 1000)
    if spoil == "catching up":
        policy.on_draft_request(CATCH_UP + 1)
    policy.on_verify(chain(k), prefills=False)
    if spoil == "reading":
        others[0].on_verify(chain(0), prefills=True)
    if spoil == "sequences":
        for other in others:
            other.on_verify(chain(0), prefills=False)
    rows = 64 if spoil == "prompt rows" else 0
    policy.on_verdict(chain(k + (spoil == "another K")), accepting(0), Verification(1.0, rows))
    assert controller.costs.round_seconds(0) is None


def test_an_undisturbed_round_is_measured() -> None:
    controller = Controller(MOST)
    run(GoodputPolicy(controller, MOST), 0.5, 1, random.Random(1))
    assert controller.costs.round_seconds(0) is not None


def test_rounds_beside_prompts_are_measured_if_none_else() -> None:
    controller = Controller(MOST)
    policy = GoodputPolicy(controller, MOST)
    for _ in range(STARVED + 2):
        policy.on_verify(chain(policy.choose(MOST, 0, 1000)), prefills=False)
        policy.on_verdict(chain(0), accepting(0), Verification(1.0, prefill_rows=64))
    assert controller.costs.round_seconds(0) is not None


@pytest.mark.parametrize("end", ["suspend", "verdict"])
def test_running_and_reading_sequences_are_counted(end: str) -> None:
    controller = Controller(MOST)
    policy = GoodputPolicy(controller, MOST, kind_of(AcceptanceMode.COUPLED, 0.0))
    policy.on_verify(chain(0), prefills=True)
    policy.on_verify(chain(0), prefills=True)
    assert (controller.sequences, controller.reading) == (1, 1)
    if end == "verdict":
        policy.on_verdict(chain(0), accepting(0), None)
        assert (controller.sequences, controller.reading) == (1, 0)
    policy.on_suspend()
    policy.on_suspend()
    assert (controller.sequences, controller.reading) == (0, 0)


def test_block_mode_acceptance_depends_on_depth() -> None:
    controller = Controller(MOST)
    assert isinstance(controller.pool(kind_of(AcceptanceMode.BLOCK, 1.0)), DepthAcceptance)
    assert isinstance(controller.pool(kind_of(AcceptanceMode.COUPLED, 1.0)), ReplayedAcceptance)


# ---- copies ----------------------------------------------------------------------------------------


def guessed(match_length: int) -> Guess:
    grade = grade_of(match_length)
    return Guess(NAME, tuple(range(2 * MOST)), match_length, grade, PRIOR_RATES[grade])


def length_of(policy: Policy, match_length: int, most: int, num_draft: int) -> int:
    """Of the guess that the policy takes; 0 where it takes none."""
    guess = policy.choose_guess([guessed(match_length)], most, num_draft)
    return 0 if guess is None else len(guess.token_ids)


def taught(policy: Policy, match_length: int, accepted: int, times: int = 300) -> None:
    for _ in range(times):
        policy.on_verdict(chain(4), accepting(accepted), None, guessed(match_length))


def test_accepted_copies_are_repeated() -> None:
    policy = GoodputPolicy(experienced(), MOST)
    run(policy, 0.5, 50, random.Random(1))
    taught(policy, 12, 4)
    assert length_of(policy, 12, MOST, policy.controller.arm) >= 4


def test_rejected_copies_become_rare() -> None:
    policy = GoodputPolicy(experienced(plain=0.01, first=0.02), MOST)
    run(policy, 0.5, 50, random.Random(1))
    taught(policy, 2, 0)
    made = [length_of(policy, 2, MOST, 0) > 0 for _ in range(4 * GUESS_AGAIN)]
    assert sum(made) == 4


def test_a_copy_beats_a_worse_draft_only() -> None:
    controller = experienced()
    worse, better = FixedLength(controller, 4), FixedLength(controller, 4)
    for policy, acceptance in ((worse, 0.1), (better, 0.98)):
        run(policy, acceptance, 300, random.Random(1))
    taught(worse, 12, 4)
    taught(better, 2, 1)
    assert length_of(worse, 12, MOST, 4) == 4
    assert length_of(better, 2, MOST, 4) == 0


def test_a_fixed_k_without_a_draft_copies() -> None:
    policy = FixedLength(experienced(), 4)
    taught(policy, 2, 0)
    assert length_of(policy, 2, MOST, 0) == 4
    assert length_of(policy, 2, 3, 0) == 3


@pytest.mark.parametrize(("k", "draft"), [(4, 0), ("auto", 4)])
def test_of_several_sources_the_learnt_best_is_taken(k: int | str, draft: int) -> None:
    """Both begin with the prior; the source whose tokens are accepted then goes first."""
    kind = GoodputPolicy if k == "auto" else FixedLength
    policy = kind(experienced(), MOST)
    run(policy, 0.1, 100, random.Random(1))
    good = replace(guessed(4), source="good")
    bad = replace(guessed(12), source="bad")
    if k == "auto":
        for _ in range(300):
            policy.on_verdict(chain(4), accepting(4), None, good)
            policy.on_verdict(chain(4), accepting(0), None, bad)
        taken = policy.choose_guess([bad, good], MOST, draft)
        assert taken is not None
        assert taken.source == "good"
    else:
        # Without a draft a fixed K repeats a seed's rounds: what was learnt may not matter.
        taken = policy.choose_guess([good, bad], MOST, 0)
        assert taken is not None
        assert taken.source == "bad"
        assert taken.prior_rate > good.prior_rate


def test_a_k_above_the_controllers_is_served() -> None:
    fixed = FixedLength(experienced(), 2 * MOST)
    rng = random.Random(1)
    for _ in range(50):
        k = fixed.choose(2 * MOST, 0, 1000)
        fixed.on_proposal(chain(k), 0.001, 0)
        fixed.on_verify(chain(k), prefills=False)
        fixed.on_verdict(chain(k), accepting(rng.randint(0, k)), Verification(0.012))
    taught(fixed, 12, 4)
    assert length_of(fixed, 12, 2 * MOST, 2 * MOST) in (0, 2 * MOST)
    assert fixed.controller.round_seconds is not None


def test_fixed_k_rounds_are_measured_and_compared() -> None:
    controller = Controller(MOST)
    fixed = FixedLength(controller, 4)
    run(fixed, 0.98, 100, random.Random(1))
    assert controller.arm == 0
    assert controller.round_seconds[4] == pytest.approx(0.014, rel=0.05)
    taught(fixed, 2, 0)
    assert length_of(fixed, 2, MOST, 4) == 0


def test_copies_without_a_draft_are_weighed() -> None:
    """No round is chosen where no draft can be asked."""
    controller = Controller(MOST)
    policy = GoodputPolicy(controller, MOST)
    for _ in range(100):
        policy.on_verify(chain(0), prefills=False)
        policy.on_verdict(chain(0), accepting(0), Verification(0.01))
    assert (controller.arm, controller.best) == (0, 0)
    assert controller.goodput[0] == pytest.approx(100, rel=0.01)
    taught(policy, 2, 0)
    taught(policy, 12, 4)
    assert length_of(policy, 2, MOST, 0) == 0
    assert length_of(policy, 12, MOST, 0) >= 4


def test_a_sequence_without_a_draft_chooses_no_k() -> None:
    controller = experienced()
    policy = GoodputPolicy(controller, MOST)
    run(policy, 0.9, 50, random.Random(1))
    assert len(controller.choosing) == 1
    policy.on_verify(chain(0), prefills=False)
    assert not controller.choosing
    policy.on_suspend()
    assert controller.sequences == 0
