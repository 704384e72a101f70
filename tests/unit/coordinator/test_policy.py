"""The choice of K against brute force, and what it may not do."""

from __future__ import annotations

from itertools import pairwise, product
from math import ceil

import pytest

from coordinator.agreement import ADVANTAGE, WAVERING
from coordinator.costs import MANY
from coordinator.habits import kind_of
from coordinator.member import CATCH_UP, Verification
from coordinator.pair import COPY_AGAIN, CROWD, PROBE_FIRST, Pair
from coordinator.policy import PROBE_DRAFT, PROBE_ROUNDS, REST, Fixed, Goodput
from coordinator.trials import FIRST_TRIAL, Trial
from paceline.core.types import Timings
from tests.unit.coordinator.pairs import FAR, MOST, crowd, known_pair, learned, settled, without_trials


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("row", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("step", [0.02, 0.3])
def test_alone_it_maximises_tokens_over_seconds(acceptance: float, row: float, step: float) -> None:
    verdict = [1 + row * k for k in range(MOST + 1)]
    drafting = [0.1 + step * k for k in range(MOST + 1)]
    pair = known_pair(verdict, drafting)
    one = learned(Goodput(pair, MOST), acceptance)
    expected = one.habits.drafts.expected(MOST)
    seconds = [verdict[0], *(verdict[k] + drafting[k] for k in range(1, MOST + 1))]
    rates = [e / t for e, t in zip(expected, seconds, strict=True)]
    chosen = one.choose(MOST, 0, 1000)
    least = 1.01 * (ADVANTAGE + WAVERING)
    assert rates[chosen] >= max(rates) - least * max(rates[0], rates[chosen])


def test_where_rows_cost_as_much_as_rounds_nothing_is_drafted() -> None:
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1))
    assert settled(pair, 0.9).choose(MOST, 0, 1000) == 0


def test_nothing_is_drafted_before_the_target_was_timed() -> None:
    assert Goodput(Pair(MOST), MOST).choose(MOST, 0, 1000) == 0


def test_no_more_than_what_can_be_used() -> None:
    pair = known_pair([1.0] * (MOST + 1), [0.01] * (MOST + 1))
    one = settled(pair, 0.95)
    assert one.choose(MOST, 0, 1000) == MOST
    assert [one.choose(k, 0, k + 1) for k in (3, 1, 0)] == [3, 1, 0]
    assert one.choose(MOST, 0, 1000) == MOST
    small = learned(Goodput(pair, 3), 0.95)
    assert small.choose(MOST, 0, 1000) == 3


def test_fixed_is_fixed() -> None:
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [9.0] * (MOST + 1))
    one = Fixed(pair, 5)
    assert [one.choose(most, 10**6, 1) for most in (8, 5, 2, 0)] == [5, 5, 2, 0]


@pytest.mark.parametrize(("first", "second"), [(0.95, 0.6), (0.9, 0.2), (0.7, 0.7), (0.95, 0.0)])
@pytest.mark.parametrize("row", [0.1, 0.4])
def test_two_together_maximise_the_tokens_of_both(first: float, second: float, row: float) -> None:
    """Each chooses for itself, by the price; no other two K make more of a second."""
    pair = known_pair([1 + row * k for k in range(MOST + 1)], [0.0] * (MOST + 1), sequences=2)
    two = [learned(Goodput(pair, MOST), acceptance) for acceptance in (first, second)]
    for one in two:
        one.verifying(0, prefills=False)
    ks = [0, 0]
    for _ in range(6):
        for i, one in enumerate(two):
            ks[i] = one.choose(MOST, 0, 1000)
            without_trials(pair)
            one.verifying(ks[i], prefills=False)
    expected = [one.habits.drafts.expected(MOST) for one in two]

    def rate(a: int, b: int) -> float:
        return (expected[0][a] + expected[1][b]) / (1 + row * (a + b) / 2)

    best = max(rate(a, b) for a, b in product(range(MOST + 1), repeat=2))
    assert rate(*ks) >= 0.97 * best


def test_noise_does_not_flip_it() -> None:
    verdict, drafting = [1 + 0.1 * k for k in range(MOST + 1)], [0.1] * (MOST + 1)
    pair = known_pair(verdict, drafting)
    one = settled(pair, 0.8)
    chosen = one.choose(MOST, 0, 1000)
    for i in range(60):
        one.habits.drafts.observe(MOST, (0, MOST)[i % 2 == 0] if i % 7 == 0 else 3)
        assert abs(one.choose(MOST, 0, 1000) - chosen) <= 1


# ---- catching up -----------------------------------------------------------------------------------


def test_catching_up_must_pay_for_itself() -> None:
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = settled(pair, 0.8)
    pair.caught_up(0.01, 1)
    assert one.choose(MOST, 100, 1000) > 0
    assert one.choose(MOST, 100, 2) == 0  # it ends before
    assert one.choose(MOST, 1_000_000, 10**6) == 0  # no number of rounds that is looked at makes it worth
    assert one.choose(MOST, CATCH_UP, 2) > 0  # what every round lacks costs nothing more


def test_the_time_of_catching_up_is_not_that_of_drafting() -> None:
    pair = Pair(MOST)
    one = Fixed(pair, 2)
    one.choose(MOST, 0, 100)
    pair._settled_at = 0
    one.choose(MOST, 0, 100)
    for _ in range(50):
        one.proposed(2, 0.5, 3)
    one.proposed(2, 10.5, 1000, 10.0)
    assert pair.catch_up == pytest.approx(0.01)
    assert pair.costs.at(1).drafting.cells[2].seconds == pytest.approx(0.5)


def test_catching_up_takes_what_was_computed_and_not_the_wait_for_the_prompts_of_others() -> None:
    """Once: after a burst of prompts no longer one was drafted for, and nothing could show it wrong."""
    pair = Pair(MOST)
    one = Fixed(pair, 2)
    one.proposed(2, 4.0, 1000, 0.5)
    assert pair.catch_up == pytest.approx(0.5 / 1000)


@pytest.mark.parametrize(("size", "lacking", "drafts"), [(1, 4000, True), (16, 100, True), (16, 4000, False)])
def test_what_the_draft_reads_for_one_all_wait_for(size: int, lacking: int, drafts: bool) -> None:
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [0.1] * (MOST + 1), size)
    pair.caught_up(0.01, 1)
    members = crowd(pair, size, 0.8)
    for one in members:
        one.choose(MOST, 0, 1000)
    without_trials(pair)
    assert any(one.choose(MOST, lacking, 1000) for one in members) is drafts


def test_what_the_draft_reads_while_the_target_reads_it_as_well_few_wait_for() -> None:
    """Once: of four that drafted half decoded plainly, for 150 tokens seemed to cost each of them."""
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [0.1] * (MOST + 1), 3)
    pair.caught_up(0.01, 1)
    for one in crowd(pair, 2, 0.8):
        one.choose(MOST, 0, 1000)
    drafts = []
    for prefills in (False, True):
        newcomer = learned(Goodput(pair, MOST), 0.8)
        newcomer.verifying(0, prefills=prefills)
        newcomer.choose(MOST, 0, 1000)
        without_trials(pair)
        drafts.append(newcomer.choose(MOST, 4000, 1000) > 0)
        newcomer.leave()
    assert drafts == [False, True]


@pytest.mark.parametrize(
    ("lacking", "remaining", "joins"), [(1000, 1000, True), (1000, 3, False), (10**6, 1000, False)]
)
def test_a_trial_is_joined_where_the_best_of_drafts_would_repay_reading_for_it(
    lacking: int, remaining: int, joins: bool
) -> None:
    """Once: what a trial could never show kept all long prompts from the draft."""
    pair = known_pair([1.0] * (MOST + 1), [5.0] * (MOST + 1))
    one = learned(Goodput(pair, MOST), 0.5)
    pair.caught_up(0.01, 1)
    one.choose(MOST, 0, 1000)
    without_trials(pair)
    assert not pair.agreement.drafts
    pair._trials[pair.load].trial = Trial(2, FAR)
    assert (one.choose(MOST, lacking, remaining) > 0) is joins


@pytest.mark.parametrize("policy", [Fixed, Goodput])
def test_who_waits_for_blocks_is_in_no_pass_and_reads_nothing(policy: type[Fixed] | type[Goodput]) -> None:
    """Once: one of five that waited kept the others from ever being measured."""
    pair = Pair(MOST)
    members = [policy(pair, MOST) for _ in range(5)]
    for one in members:
        one.verifying(0, prefills=True)
    for one in members[:4]:
        one.judged(0, 0, None)
    assert (pair.sequences, pair.prefilling) == (5, 1)
    members[4].waits()
    members[4].waits()
    assert (pair.sequences, pair.prefilling) == (4, 0)
    members[4].verifying(0, prefills=True)
    assert (pair.sequences, pair.prefilling) == (5, 1)
    for one in members:
        one.leave()
    assert (pair.sequences, pair.prefilling) == (0, 0)


@pytest.mark.parametrize(("sequences", "timed"), [(1, {1, 8}), (2, {1, 8}), (4, {8})])
@pytest.mark.parametrize("policy", [Fixed, Goodput])
def test_the_few_tokens_that_end_an_answer_wait_for_the_chains_of_others(
    policy: type[Fixed] | type[Goodput], sequences: int, timed: set[int]
) -> None:
    """They come with the others' chains: drafting less would save nothing if their times were taken."""
    pair = known_pair([1.0] * (MOST + 1), [0.0] * (MOST + 1), sequences)
    load = pair.costs.at(sequences)
    load.drafting.cells.clear()
    pair.costs.at(2 * sequences).proposed(MOST, 1.0)
    members = [learned(policy(pair, MOST), 1.0) for _ in range(sequences)]
    for one in members:
        one.verifying(0, prefills=False)
    for _ in range(2):  # every other one begins a round later
        for one in members:
            one.choose(MOST, 0, 1000)
    without_trials(pair)
    pair._settled_at = 0
    for most in (MOST, 1):
        k = members[0].choose(most, 0, 1000)
        members[0].proposed(k, 1.0, 0)
        assert k == most
    assert set(load.drafting.cells) == timed


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_proposal_that_waited_for_what_the_draft_read_for_another_is_not_timed(asked_first: bool) -> None:
    """Also where the other one's came first: both were in the passes that read."""
    pair = Pair(MOST)
    reads, other = Fixed(pair, 2), Fixed(pair, 2)
    for one in (reads, other):
        one.verifying(0, prefills=False)
        one.choose(MOST, 0, 100)
    pair._settled_at = 0
    reads.choose(MOST, 500, 100)
    other.choose(MOST, 0, 100)
    order = [(other, 0), (reads, 500)] if asked_first else [(reads, 500), (other, 0)]
    for one, lacking in order:
        one.asks(lacking)
    reads.proposed(2, 10.0, 500)
    reads.verifying(2, prefills=False)
    assert pair.settled
    other.proposed(2, 10.0, 0)
    assert not pair.costs.at(2).drafting.cells
    other.choose(MOST, 0, 100)
    other.asks(0)
    other.proposed(2, 0.5, 0)
    assert pair.costs.at(2).drafting.cells[2].seconds == pytest.approx(0.5)


def test_nothing_is_measured_while_the_workers_read() -> None:
    pair = Pair(MOST)
    one, other = Fixed(pair, 2), Fixed(pair, 2)
    other.verifying(0, prefills=False)
    one.verifying(0, prefills=False)
    other.choose(MOST, 500, 100)
    pair._settled_at = 0
    other.asks(500)
    one.judged(0, 0, Verification(1.0, 2, 2))
    assert not pair.costs.at(2).verdict.cells
    other.verifying(2, prefills=False)
    assert pair.catching_up == 0
    one.verifying(2, prefills=False)
    one.judged(2, 0, Verification(1.0, 6, 2))
    assert pair.costs.at(2).verdict.cells


def test_prefill_in_the_same_pass_is_not_the_price_of_a_round() -> None:
    pair = Pair(MOST)
    one = Fixed(pair, 2)
    for prefill in (499, 0):
        one.verifying(0, prefills=False)
        one.judged(0, 0, Verification(float(prefill + 1), prefill + 1, 1, prefill))
    assert pair.costs.at(1).verdict.cells[0].seconds == 1.0


def test_prompts_that_few_rows_wait_for_are_no_price_of_drafting() -> None:
    """Once: of plain rounds only those without prompts counted, of long ones those with them did as well."""
    pair, base = Pair(MOST), {0: 10.0, 4: 30.0}
    one = Fixed(pair, MOST)
    for i in range(200):
        k, rows = (0, 4)[i // 50 % 2], (0, 16, 16, 32)[i % 4]
        one.verifying(k, prefills=False)
        pair._settled_at, one._settled = 0, True
        timings = Timings(
            rows=k + 1 + rows // 2, sequences=1, prefill_rows=rows // 2, prefill_rows_before=rows // 2
        )
        one.judged(k, 0, Verification.of(base[k] + 0.5 * rows, timings))
    cells = pair.costs.at(1).verdict.cells
    assert {k: cell.seconds for k, cell in cells.items()} == pytest.approx(base)
    assert all(cell.weight >= 40 for cell in cells.values())


def test_what_rows_of_prompts_take_is_found_while_they_keep_all_else_from_counting() -> None:
    """Once: where some prompt is always being read nothing was found at all."""
    pair = Pair(MOST)
    one, other = Fixed(pair, 0), Fixed(pair, 0)
    other.verifying(0, prefills=True)
    for i in range(100):
        rows = (0, 16, 32)[i % 3]
        one.verifying(0, prefills=False)
        one.judged(0, 0, Verification(10.0 + 0.5 * rows, 2, 2, rows))
    assert pair.prompts.row == pytest.approx(0.5)
    assert not pair.costs.loads


def test_draft_tokens_of_another_coordinator_are_no_prefill() -> None:
    """Once: who decoded plainly beside one that drafted took every pass for somebody's prompt."""
    pair = Pair(MOST)
    one, other = Fixed(pair, 0), Fixed(pair, 0)
    for _ in range(3):
        for member in (one, other):
            member.verifying(0, prefills=False)
        for member in (one, other):
            member.judged(0, 0, Verification(1.0, 2 + 2 * 5, 4))
    assert pair.costs.at(2).verdict.cells[0].weight > 0


def test_a_worker_that_says_nothing_of_its_pass_is_not_timed() -> None:
    assert Verification.of(1.0, Timings()) is None
    assert Verification.of(1.0, Timings(0.1, 0.2, 5, 2, 0.1, 3)) == Verification(1.0, 5, 2, 3)


# ---- probes ----------------------------------------------------------------------------------------


def off(pair: Pair) -> Goodput:
    """A sequence whose draft tokens were all rejected."""
    for _ in range(1000):
        pair.habits.drafts.observe(MOST, 0)
    one = settled(pair, 0.0)
    assert one.choose(MOST, 0, 1000) == 0
    return one


CHEAP = ([1 + 0.05 * k for k in range(MOST + 1)], [0.1] * (MOST + 1))


def test_a_switched_off_draft_is_probed_at_doubling_intervals() -> None:
    pair = known_pair(*CHEAP)
    one = off(pair)
    probes = []
    for i in range(900):
        k = one.choose(MOST, 0, 1000)
        without_trials(pair)
        if k:
            assert k == PROBE_DRAFT
            probes.append(i)
            one.habits.drafts.observe(k, 0)
    starts = [p for p in probes if p - 1 not in probes]
    assert len(probes) == PROBE_ROUNDS * len(starts)
    gaps = [b - a for a, b in pairwise(starts)]
    assert len(gaps) >= 3
    assert all(1.5 * a < b < 2.5 * a for a, b in pairwise(gaps[:3]))


def test_a_probe_that_finds_something_switches_it_on() -> None:
    pair = known_pair(*CHEAP)
    one = off(pair)
    for _ in range(PROBE_FIRST + 40):
        k = one.choose(MOST, 0, 1000)
        without_trials(pair)
        if k:
            one.habits.drafts.observe(k, k)
    assert one.choose(MOST, 0, 1000) > 0
    assert pair._probe_after == PROBE_FIRST


def test_no_probe_where_the_best_draft_would_be_of_no_use() -> None:
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = settled(pair, 0.9)
    for _ in range(600):
        assert one.choose(MOST, 0, 1000) == 0
        without_trials(pair)


def test_sequences_do_not_probe_together() -> None:
    pair = known_pair(*CHEAP, sequences=30)
    for _ in range(1000):
        pair.habits.drafts.observe(MOST, 0)
    many = crowd(pair, 30, 0.0)
    most = 0
    for _ in range(PROBE_FIRST + REST * len(many) // 4):
        drafted = 0
        for one in many:
            k = one.choose(MOST, 0, 1000)
            without_trials(pair)
            drafted += k > 0
            if k:
                one.habits.drafts.observe(k, 0)
            one.verifying(k, prefills=False)
        most = max(most, drafted)
    assert 0 < most <= PROBE_ROUNDS


@pytest.mark.parametrize(
    ("sequences", "longer"),
    [(CROWD - 1, 1), (2 * CROWD - 1, 3.515625), (2 * CROWD, 4), (32, 16), (8 * CROWD, 64)],
)
def test_probes_of_many_are_as_much_rarer_as_each_costs_more(sequences: int, longer: float) -> None:
    """A probe splits the passes of all, and all of them begin rounds."""
    pair = Pair(MOST)
    crowd(pair, sequences)
    pair.probing()
    waited = 0
    while not pair.may_probe:
        pair.count_round()
        waited += 1
    assert waited == ceil(PROBE_FIRST * longer)


def test_no_probe_for_which_the_draft_must_read_too_much() -> None:
    pair = known_pair(*CHEAP)
    one = off(pair)
    pair.caught_up(0.01, 1)
    for _ in range(600):
        assert one.choose(MOST, 100_000, 10**6) == 0
        without_trials(pair)


def beginners(pair: Pair, size: int, rounds: int) -> list[list[bool]]:
    """Which of so many sequences that begin to draft do so in each of the next rounds."""
    members = crowd(pair, size, 0.9)
    for one in members:
        one.choose(MOST, 0, 1000)
    without_trials(pair)
    for one in members:
        one._kept = one._rest = 0
        one._waited = False
    pair.beginners = 0
    return [[one.choose(MOST, 0, 1000) > 0 for one in members] for _ in range(rounds)]


def test_of_a_crowd_that_begins_to_draft_every_other_one_does_so_a_round_later() -> None:
    """They shared all passes; in step, draft and target would wait for each other."""
    pair = known_pair([1.0 + 0.01 * k for k in range(MOST + 1)], [0.0] * (MOST + 1), 4)
    assert beginners(pair, 4, 3) == [[True, False, True, False], [True] * 4, [True] * 4]
    few = known_pair([1.0 + 0.01 * k for k in range(MOST + 1)], [0.0] * (MOST + 1), 2)
    assert beginners(few, 2, 1) == [[True, True]]


def test_who_joins_a_crowd_that_drafts_does_not_wait() -> None:
    pair = known_pair([1.0 + 0.01 * k for k in range(MOST + 1)], [0.0] * (MOST + 1), 4)
    beginners(pair, 4, 0)
    pair.drafting, pair.beginners = 8, 1
    newcomer = learned(Goodput(pair, MOST), 0.9)
    newcomer.verifying(0, prefills=False)
    assert newcomer.choose(MOST, 0, 1000) > 0


# ---- shares ----------------------------------------------------------------------------------------


def test_who_leaves_takes_its_share_with_it() -> None:
    pair = Pair(MOST)
    one, other = Fixed(pair, 4), Fixed(pair, 2)
    one.verifying(4, prefills=False)
    other.verifying(2, prefills=True)
    assert (pair.sequences, pair.drafting, pair.prefilling) == (2, 6, 1)
    assert pair.mean_draft == 3
    one.leave()
    one.leave()
    other.leave()
    assert (pair.sequences, pair.drafting, pair.prefilling) == (0, 0, 0)
    assert pair.yields == pytest.approx(0)
    Fixed(pair, 1).leave()
    assert pair.sequences == 0


def test_a_probe_that_is_cut_off_found_nothing() -> None:
    pair = known_pair(*CHEAP)
    one = off(pair)
    while not one.choose(MOST, 0, 1000):
        without_trials(pair)
    before = pair._probe_after
    one.leave()
    assert pair._probe_after == 2 * before


# ---- copying from the text -------------------------------------------------------------------------


def copies_well(one: Goodput | Fixed, match: int, accepted: int, rounds: int = 300) -> None:
    """After many copies of as many tokens as possible, of which so many were accepted."""
    for _ in range(rounds):
        one.verifying(MOST, prefills=False, match=match)
        one.judged(MOST, accepted, None, match)


def test_copies_and_drafts_are_judged_apart() -> None:
    one = Goodput(Pair(MOST), MOST)
    before = one.habits.drafts.expected(MOST), one.habits.of(16).expected(MOST)
    copies_well(one, 2, 0)
    assert (one.habits.drafts.expected(MOST), one.habits.of(16).expected(MOST)) == before
    assert one.habits.of(2).expected(1)[1] < 1.1
    assert Goodput(one.pair, MOST).habits.of(2).expected(1)[1] < 1.1


def test_longer_matches_are_believed_more_from_the_beginning() -> None:
    copies = Pair(MOST).habits.copies
    firsts = [copies.after(match).rates(1)[0] for match in (2, 3, 5, 9)]
    assert firsts == sorted(set(firsts))
    assert copies.after(2) is not copies.after(3) is copies.after(4)
    assert copies.after(5) is copies.after(8)
    assert copies.after(9) is copies.after(16)


@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("accepted", [0, 1, 3, 8])
@pytest.mark.parametrize("wait", [0.1, 0.5, 2.0])
def test_alone_it_copies_where_that_makes_more_tokens_a_second(
    acceptance: float, accepted: int, wait: float
) -> None:
    verdict = [1.0 + 0.05 * k for k in range(MOST + 1)]
    one = settled(known_pair(verdict, [wait * k / 4 for k in range(MOST + 1)]), acceptance)
    copies_well(one, 9, accepted)
    drafting = one.choose(MOST, 0, 1000)
    table = one.pair.round_seconds()
    assert table is not None
    copied = one.habits.of(9).expected(MOST)
    drafted = one.habits.drafts.expected(MOST)[drafting]
    rates = [e / t for e, t in zip(copied, table.verify, strict=True)]
    best, other = max(rates[1:]), drafted / table.whole[drafting]
    chosen = one.copy(9, MOST, drafting)
    if best > 1.05 * other:
        assert rates[chosen] == pytest.approx(max(rates), rel=0.05)
    elif best < 0.95 * other:
        assert chosen == 0


@pytest.mark.parametrize(
    ("sequences", "useful", "copies"), [(MANY - 1, 0.5, MOST), (MANY, 0.5, 0), (MANY, 1, MOST - 1)]
)
def test_among_many_a_row_that_few_add_is_dear(sequences: int, useful: float, copies: int) -> None:
    """What all of them paid for draft tokens says little of what it costs."""
    pair = known_pair([1 + 0.05 * k for k in range(MOST + 1)], [9.0] * (MOST + 1), sequences)
    one, *_ = crowd(pair, sequences)
    for i in range(300):
        copies_well(one, 9, MOST if i % 2 or useful == 1 else 0, rounds=1)
    one.verifying(0, prefills=False)
    assert one.choose(MOST, 0, 1000) == 0
    without_trials(pair)
    assert one.copy(9, MOST, 0) == copies


def copying_beside(pair: Pair, others: list[Goodput], one: Goodput, count: int, row: float) -> None:
    """Rounds of all; `one` copies four tokens every other time. A pass takes 1 s, and `row` for each row."""
    size = len(others) + 1
    for i in range(count):
        copied = 4 * (i % 2)
        one.verifying(copied, prefills=False, match=9)
        for other in others:
            other.verifying(0, prefills=False)
        timing = Verification(1 + row * (size + copied), size + copied, size)
        one.judged(copied, copied, timing, match=9)
        for other in others:
            other.judged(0, 0, timing)


@pytest.mark.parametrize("row", [0.01, 0.2])
def test_what_a_row_of_a_copy_costs_is_seen_in_the_passes_of_all(row: float) -> None:
    size = 8
    pair = known_pair([1 + row * size * (1 + k) for k in range(MOST + 1)], [9.0] * (MOST + 1), size)
    one, *others = crowd(pair, size)
    without_trials(pair)
    copying_beside(pair, others, one, 100, row)
    table = pair.round_seconds()
    assert table is not None
    expected = [1 + row * (size + size * k) for k in range(MOST + 1)]
    assert table.copied == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("disturbance", ["a prompt", "a draft", "a draft that is gone", "passes apart"])
def test_copies_are_not_timed_where_rows_may_be_of_something_else(disturbance: str) -> None:
    size = 8
    pair = known_pair([1.0] * (MOST + 1), [9.0] * (MOST + 1), size)
    one, *others = crowd(pair, size)
    without_trials(pair)
    copies = pair.costs.at(size).copies
    copying_beside(pair, others, one, 10, 0.1)
    before = copies.plain.weight + copies.copied.weight
    assert before > 0
    for _ in range(40):
        sequences = size // 2 if disturbance == "passes apart" else size
        for member in (one, *others):
            member.verifying(0, prefills=False)
        if disturbance == "a prompt":
            others[0].verifying(0, prefills=True)
        elif disturbance != "passes apart":
            others[0].verifying(3, prefills=False)
        if disturbance == "a draft that is gone":
            others[0].judged(3, 3, None)
            others[0].verifying(0, prefills=False)
        for member in (one, *others[1:]):
            member.judged(0, 0, Verification(5.0, sequences + 3, sequences))
    assert copies.plain.weight + copies.copied.weight == before


@pytest.mark.parametrize(("sequences", "looked"), [(CROWD - 1, 40), (CROWD, 40 // (REST + 1))])
def test_among_many_a_match_is_seldom_looked_for_where_copying_is_of_no_use(
    sequences: int, looked: int
) -> None:
    pair = known_pair([1.0 + k for k in range(MOST + 1)], [9.0] * (MOST + 1), sequences)
    one, *_ = crowd(pair, sequences, 0.1)
    without_trials(pair)
    count = 0
    copies_well(one, 2, 0)
    for _ in range(40):
        drafting = one.choose(MOST, 0, 1000)
        if one.looks():
            count += 1
            assert one.copy(2, MOST, drafting) == 0
    assert count == looked


def test_among_many_a_match_is_seldom_looked_for_where_there_is_none() -> None:
    pair = known_pair([1.0 + k for k in range(MOST + 1)], [9.0] * (MOST + 1), CROWD)
    one, *_ = crowd(pair, CROWD, 0.1)
    without_trials(pair)
    assert [one.looks() for _ in range(2 * (REST + 1))] == 2 * [True, *[False] * REST]


def test_among_many_the_next_match_is_looked_for_at_once_where_copying_is_of_use() -> None:
    pair = known_pair([1.0 + 0.1 * k for k in range(MOST + 1)], [9.0] * (MOST + 1), CROWD)
    one, *_ = crowd(pair, CROWD, 0.1)
    copies_well(one, 9, MOST)
    for _ in range(20):
        drafting = one.choose(MOST, 0, 1000)
        without_trials(pair)
        assert one.looks()
        assert one.copy(9, MOST, drafting)


def test_a_copy_is_not_longer_than_what_can_be_used() -> None:
    one = settled(known_pair([1.0] * 9, [9.0] * 9), 0.1)
    copies_well(one, 9, MOST)
    assert one.copy(9, MOST, one.choose(MOST, 0, 1000)) == MOST
    assert one.copy(9, 3, one.choose(MOST, 0, 1000)) == 3


def test_nothing_is_copied_in_a_round_that_measures() -> None:
    """A trial of plain decoding would tell nothing of it."""
    pair = known_pair([1.0] * 9, [1.0] * 9)
    one = learned(Goodput(pair, MOST), 0.9)
    copies_well(one, 9, MOST)
    measured = 0
    for _ in range(3 * FIRST_TRIAL):
        k = one.choose(MOST, 0, 1000)
        trial, copied = pair.trial, one.copy(9, MOST, k)
        assert (copied == 0) == (trial is not None)
        measured += trial is not None
        one.verifying(copied or k, prefills=False, match=9 if copied else 0)
        one.judged(copied or k, copied, None, 9 if copied else 0)
    assert measured


def test_copying_that_is_of_no_use_is_tried_now_and_then() -> None:
    one = settled(known_pair([1.0 + k for k in range(9)], [9.0] * 9), 0.1)
    copies_well(one, 2, 0)
    copies = [one.copy(2, MOST, one.choose(MOST, 0, 1000)) for _ in range(3 * COPY_AGAIN)]
    assert [k for k in copies if k] == [PROBE_DRAFT] * 3
    # What comes of it is believed soon.
    for _ in range(4):
        one.judged(MOST, MOST, None, 2)
    assert one.habits.of(2).expected(1)[1] > 1.3


@pytest.mark.parametrize(("accepted", "share", "copies"), [(4, 0.0, True), (1, 0.0, False), (1, 0.7, True)])
def test_a_fixed_k_is_copied_where_waiting_for_the_draft_gives_less(
    accepted: int, share: float, copies: bool
) -> None:
    drafting = share / (1 - share)
    pair = known_pair([1.0] * 9, [drafting] * 9)
    one = Fixed(pair, 4)
    for _ in range(300):
        one.judged(4, 2, None)
        one.judged(4, accepted, None, 9)
    k = one.choose(MOST, 0, 1000)
    assert k == 4
    assert one.copy(9, MOST, k) == (4 if copies else 0)
    assert one.copy(9, 3, 0) == 3, "where there is no draft to ask, it is that or nothing"


def test_requests_of_another_kind_say_little_of_a_request() -> None:
    """Greedy ones do not make hot ones look good, nor the other way round."""
    pair = Pair(MOST)
    cold, hot = kind_of("coupled", 0.0), kind_of("coupled", 1.0)
    for _ in range(200):
        Fixed(pair, MOST, cold).judged(MOST, MOST, None)
        Fixed(pair, MOST, hot).judged(MOST, 0, None)
    made = [Goodput(pair, MOST, kind).habits.drafts.expected(1)[1] for kind in (cold, hot)]
    assert made[0] > 1.85
    assert made[1] < 1.15
    # One that nothing is known of is like all the others together.
    new = Goodput(pair, MOST, kind_of("block", 0.5)).habits.drafts.expected(1)[1]
    assert made[1] + 0.1 < new < made[0] - 0.1


def test_kinds_are_few() -> None:
    assert kind_of("block", 0.0) == ("block", 0)
    assert kind_of("block", 0.3) == kind_of("block", 0.5) == ("block", 1)
    assert kind_of("coupled", 0.7) == kind_of("coupled", 1.0) == ("coupled", 2)
    assert kind_of("coupled", 2.0) == kind_of("coupled", 50.0)


def test_without_a_draft_to_ask_what_copying_costs_is_learned_too() -> None:
    """Nobody asks for K then, and rounds are not counted."""
    one = Goodput(Pair(MOST), MOST)
    copies_well(one, 9, MOST)

    def judged(num_draft: int, seconds: float) -> None:
        one.verifying(num_draft, prefills=False, match=9 if num_draft else 0)
        timing = Verification(seconds, num_draft + 1, 1)
        one.judged(num_draft, num_draft, timing, 9 if num_draft else 0)

    assert one.copy(9, MOST, 0) == 0, "nothing is known of the target"
    for _ in range(3):
        judged(0, 1.0)
    assert one.copy(9, MOST, 0) == MOST
    for _ in range(60):
        judged(MOST, 20.0)
    assert one.copy(9, MOST, 0) < MOST, "a row costs more than two rounds"
