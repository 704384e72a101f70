"""When a pair is put on trial, and when nobody thinks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.agreement import Agreement
from coordinator.costs import bracket, least
from coordinator.member import Verification
from coordinator.pair import PATIENCE, Pair
from coordinator.policy import REST, Fixed, Goodput
from coordinator.trials import (
    AFTERMATH,
    EARLY,
    FEW,
    FIRST_TRIAL,
    HOPELESS,
    SHARING,
    SOON,
    TRIAL_AGAIN,
    TRIAL_COST,
    TRIAL_DOUBT,
    TRIAL_DRAFTING,
    TRIAL_LAST,
    TRIAL_PLAIN,
    TRIAL_WAITS,
    Trial,
    Trials,
)
from tests.unit.coordinator.pairs import (
    FAR,
    MOST,
    crowd,
    known_pair,
    learned,
    rounds,
    settled,
    without_trials,
)


def newcomer() -> Goodput:
    """The first sequence of a pair, its prompt read."""
    one = Goodput(Pair(MOST), MOST)
    one.verifying(0, prefills=True)
    one.judged(0, 0, None)
    return one


def plain_is_far_behind() -> Agreement:
    """Four draft tokens are best, three are close."""
    agreement = Agreement(MOST)
    agreement.drafts, agreement.num_draft = True, 4
    agreement.plain_rate, agreement.rate = 0.3, 1.0
    agreement.rates = [0.3, 0.5, 0.6, 0.95, 1.0, 0.85, 0.8, 0.7, 0.6]
    return agreement


def test_a_draft_that_was_never_tried_is_tried() -> None:
    one = newcomer()
    ks = rounds(one, FIRST_TRIAL + 10)
    assert ks[: FIRST_TRIAL - 1] == [0] * (FIRST_TRIAL - 1)
    assert any(ks)


def test_plain_decoding_is_tried_where_drafting_seemed_better() -> None:
    pair = known_pair([1 + 0.3 * k for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = learned(Goodput(pair, MOST), 0.8)
    ks = [one.choose(MOST, 0, 1000) for _ in range(FIRST_TRIAL + TRIAL_PLAIN)]
    assert 0 in ks
    assert ks[0] > 0


def test_trials_become_rare() -> None:
    one = newcomer()
    ks = rounds(one, 4000)
    drafted = [sum(k > 0 for k in ks[i : i + 1000]) for i in range(0, 4000, 1000)]
    assert drafted[0] < 1000 * 0.12
    assert drafted[-1] < 1000 * 0.02
    assert TRIAL_AGAIN < 1000


def test_trials_of_what_is_close_cost_little() -> None:
    one = newcomer()
    rounds(one, 100, wait=0.1)
    drafted = sum(k > 0 for k in rounds(one, 4000, wait=0.1))
    lost = drafted * 0.1 / 1.1
    assert 0 < lost < 1.2 * TRIAL_COST * 4000


def test_the_first_trial_of_a_load_takes_no_k_of_another_one() -> None:
    """Once: one client had settled on eight draft tokens, and sixteen that came tried eight at once."""
    agreement, trials = Agreement(MOST), Trials.of(16)
    agreement.num_draft = 8
    while trials.trial is None:
        trials.step(agreement, 16, known=False, reading=False)
    assert trials.trial.num_draft == 2


def test_where_plain_decoding_is_far_behind_neighbours_are_tried() -> None:
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    trials.number = 2
    tried = []

    def go_on() -> None:
        for _ in range(20_000):
            if trials.step(agreement, 1, known=True, reading=False) and trials.trial is not None:
                tried.append(trials.trial.num_draft)

    go_on()
    assert set(tried) == {0, 3}, "not 5, of which little is expected"
    assert tried.count(0) <= len(tried) // 2 + 1
    agreement.rates[5] = 0.95
    go_on()
    assert set(tried) == {0, 3, 5}


def test_a_draft_s_other_lengths_are_tried_also_where_plain_decoding_is_close() -> None:
    """Drafting 6 was measured once, when all was slower: nobody would ever know."""
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    trials.number = EARLY
    agreement.plain_rate = agreement.rates[0] = 0.9
    agreement.rates[6] = 0.91
    tried: list[int] = []
    while len(tried) < 40:
        if trials.step(agreement, 1, known=True, reading=False) and trials.trial is not None:
            tried.append(trials.trial.num_draft)
    assert set(tried) == {0, 3, 6}
    assert 18 <= tried.count(0) <= 22


@pytest.mark.parametrize(("plain", "tried"), [(0.95, [0] * 5), (0.8, [0, 0, 3])])
def test_plain_decoding_that_comes_close_is_tried_again_soon(plain: float, tried: list[int]) -> None:
    """In a service's first seconds it seems slower than it turns out to be."""
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    agreement.plain_rate = agreement.rates[0] = plain
    seen: list[int] = []
    for _ in range(EARLY * (SOON + (1 + FEW) * TRIAL_PLAIN)):
        if trials.step(agreement, 1, known=True, reading=False) and trials.trial is not None:
            seen.append(trials.trial.num_draft)
    assert seen == tried


@pytest.mark.parametrize(("made", "lasts"), [(0.5, 1), (0.7, 1), (0.8, 1 + FEW), (1.3, 1 + FEW)])
def test_what_is_seen_to_be_far_behind_is_not_tried_for_long(made: float, lasts: int) -> None:
    """A single request would wait for three dozen plain rounds to see that they are half as fast."""
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    trials.number = EARLY - 1
    while trials.trial is None:
        trials.step(agreement, 1, known=True, reading=False)
    trial, length = trials.trial, TRIAL_PLAIN if trials.trial.num_draft == 0 else TRIAL_DRAFTING
    begun = trials.rounds
    while trials.trial is not None:
        trial.made, trial.seconds = trial.made + 10, trial.seconds + 10 / made / agreement.rate
        trials.step(agreement, 1, known=True, reading=False)
    assert trials.rounds - begun == lasts * length


@pytest.mark.parametrize("size", [1, 4])
def test_waiting_for_drafts_that_read_is_not_what_ends_a_trial(size: int) -> None:
    agreement, trials = plain_is_far_behind(), Trials.of(size)
    trial = Trial(4, until=3, longer=97, waits=50, seconds=100.0, made=1)
    trials.trial = trial
    for _ in range(40):
        assert not trials.step(agreement, size, known=True, reading=True)
    assert (trial.until, trial.until + trial.longer) == (43, 140)
    assert [trials.step(agreement, size, known=True, reading=False) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("best", "interval"), [(4, TRIAL_LAST), (5, TRIAL_AGAIN)])
def test_after_a_trial_that_found_another_k_the_next_one_comes_soon(best: int, interval: int) -> None:
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    trials.number, trials.drafted, trials.best = EARLY - 1, True, 4
    trials.interval, trials.trial = TRIAL_LAST, Trial(5, until=1)
    agreement.num_draft = best
    assert trials.step(agreement, 1, known=True, reading=False)
    assert trials.interval == interval


@pytest.mark.parametrize(("plain", "soon"), [(0.97, True), (0.3, False)])
def test_what_comes_close_is_tried_though_it_was_far_behind(plain: float, soon: bool) -> None:
    """Requests at another temperature came: the next trial was far away, since drafting was twice as good."""
    agreement, trials = plain_is_far_behind(), Trials.of(4)
    trials.number, trials.drafted, trials.best = EARLY, True, 4
    trials.next = trials.rounds + 4 * TRIAL_LAST
    agreement.plain_rate = agreement.rates[0] = plain
    for _ in range(4 * 3 * TRIAL_AGAIN):
        trials.step(agreement, 4, known=True, reading=False)
    assert (trials.number > EARLY) is soon


@pytest.mark.parametrize("drafts", [False, True])
def test_who_changes_its_mind_without_a_trial_tries_what_it_left(drafts: bool) -> None:
    """Sixteen plain sequences seemed twice as slow in a service's first second: what followed were trials of
    other K, since plain decoding was far behind."""
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    trials.number, trials.drafted, trials.next = 2, not drafts, 10**9
    agreement.drafts = drafts
    agreement.plain_rate = agreement.rates[0] = 0.62
    for _ in range(TRIAL_DOUBT + SOON):
        trials.step(agreement, 1, known=True, reading=False)
    assert trials.trial is not None
    assert trials.trial.num_draft == (0 if drafts else 4)


@pytest.mark.parametrize(("tried", "rare"), [(3, False), (0, True)])
def test_a_trial_costs_what_it_makes_less(tried: int, rare: bool) -> None:
    """One draft token less costs little, however far behind plain decoding is."""
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    trials.number, trials.trial = EARLY, Trial(tried, until=1)
    trials.drafted, trials.best = True, 4
    assert trials.step(agreement, 1, known=True, reading=False)
    assert (trials.interval == TRIAL_LAST) is rare


@pytest.mark.parametrize(("seconds", "more"), [(10.0, 0.0), (90.0, 80.0)])
def test_what_a_trial_of_drafting_brings_with_it_makes_the_next_one_rare(seconds: float, more: float) -> None:
    """Drafts read, passes fall apart: all that was waited for counts, beside the tokens that came of it."""
    agreement, trials = plain_is_far_behind(), Trials.of(1)
    agreement.drafts, agreement.plain_rate, agreement.rate = False, 1.0, 0.98
    trials.number, trials.best = EARLY, agreement.num_draft
    trials.trial = Trial(4, until=1, seconds=seconds, made=10)
    assert trials.step(agreement, 1, known=True, reading=False)
    expected = TRIAL_DRAFTING * (1 + FEW) * 0.02
    assert trials.overhead == pytest.approx(max(0.0, more - expected))
    assert trials.interval == max(
        TRIAL_AGAIN, min(TRIAL_LAST, int((expected + trials.overhead) / TRIAL_COST))
    )


@pytest.mark.parametrize(
    ("drafts", "size", "rare"), [(False, SHARING, True), (False, SHARING - 1, False), (True, SHARING, False)]
)
def test_sequences_that_share_passes_pay_for_a_trial_after_it(drafts: bool, size: int, rare: bool) -> None:
    agreement, trials = plain_is_far_behind(), Trials.of(size)
    agreement.drafts = trials.drafted = drafts
    agreement.plain_rate, agreement.rate = (0.98, 1.0) if drafts else (1.0, 0.98)
    agreement.rates[agreement.num_draft] = agreement.rate
    trials.number, trials.best = EARLY, agreement.num_draft
    tried = 0 if drafts else agreement.num_draft
    trials.trial = Trial(tried, until=1, seconds=10.0, made=10)
    assert trials.step(agreement, size, known=True, reading=False)
    assert (trials.interval >= AFTERMATH / TRIAL_COST) is rare


@pytest.mark.parametrize("size", [1, 4, 40])
def test_a_trial_waits_for_drafts_that_read_but_not_for_ever(size: int) -> None:
    agreement, trials = Agreement(MOST), Trials.of(size)

    def length(reading: int) -> int:
        """Rounds of each until it is over, if drafts read for so many."""
        while not trials.step(agreement, size, known=False, reading=False):
            pass
        count = 0
        while trials.trial is not None:
            trials.step(agreement, size, known=False, reading=count < reading * size)
            count += 1
        return count // size

    alone = length(0)
    trials.number = 0
    assert length(3) == alone + 3
    trials.number = 0
    assert length(10**6) == alone + TRIAL_WAITS


@pytest.mark.parametrize("size", [1, 16])
def test_what_seemed_hopeless_is_tried_again_at_last(size: int) -> None:
    """Once: what a busy moment told of a load's first trial was never asked again."""
    agreement, trials = plain_is_far_behind(), Trials.of(size)
    agreement.drafts, agreement.plain_rate, agreement.rate = False, 1.0, 0.2
    trials.number, trials.ended = 9, 1000 * size
    trials.rounds = trials.next = trials.ended
    rounds_ = 0
    while trials.trial is None:
        trials.step(agreement, size, known=True, reading=False)
        rounds_ += 1
    assert HOPELESS <= rounds_ / size < HOPELESS + TRIAL_LAST
    assert trials.trial.num_draft > 0


def test_no_trial_begins_while_prompts_are_read() -> None:
    agreement, trials = Agreement(MOST), Trials.of(1)
    for _ in range(10 * FIRST_TRIAL):
        assert not trials.step(agreement, 1, known=False, reading=True)
    assert trials.step(agreement, 1, known=False, reading=False)
    assert trials.trial is not None


# ---- what is measured ------------------------------------------------------------------------------


def test_nothing_is_measured_while_many_leave() -> None:
    pair = Pair(MOST)
    members = [Fixed(pair, 0) for _ in range(10)]
    for one in members:
        one.verifying(0, prefills=False)
    for one in members[:3]:
        one.leave()
    members[-1].judged(0, 0, Verification(1.0, 8, 8))
    members[-2].judged(0, 0, Verification(1.0, 8, 8))
    assert not any(load.verdict.cells for load in pair.costs.loads.values())


def test_plain_rounds_that_still_tell_of_drafting_are_not_measured() -> None:
    """Sequences that come out of drafting share no passes yet: plain decoding seemed a fifth slower."""
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [0.1] * (MOST + 1))
    del pair.costs.at(1).verdict.cells[0]
    one, since = learned(Goodput(pair, MOST), 0.8), 0
    while pair.trial is None or pair.trial.num_draft:
        one.choose(MOST, 0, 1000)
    while pair.trial is not None:
        one.verifying(0, prefills=False)
        one.judged(0, 0, Verification(1.0 if since >= 4 else 1.5, 1, 1))
        assert one.choose(MOST, 0, 1000) == 0 or pair.trial is None
        since += 1
    plain = pair.costs.at(1).verdict.cells[0]
    assert plain.weight >= 4
    assert plain.seconds == pytest.approx(1.0)


# ---- thinking --------------------------------------------------------------------------------------


@pytest.fixture
def thought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every round that was begun by thinking."""
    times: list[int] = []
    begin = Pair.begin_round

    def counted(pair: Pair) -> object:
        times.append(pair.verdicts)
        return begin(pair)

    monkeypatch.setattr(Pair, "begin_round", counted)
    return times


def test_where_nobody_drafts_most_rounds_are_begun_without_thinking(thought: list[int]) -> None:
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = settled(pair, 0.2)
    thought.clear()
    assert rounds(one, 40 * (REST + 1)) == [0] * 40 * (REST + 1)
    assert 40 <= len(thought) <= 42


@pytest.mark.parametrize(("sequences", "rests"), [(2, REST), (7, REST), (8, 2 * REST), (32, 8 * REST)])
def test_the_more_decode_plainly_the_less_is_thought(thought: list[int], sequences: int, rests: int) -> None:
    """All of them wait for what is done for each."""
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1), sequences)
    one, *_ = crowd(pair, sequences, 0.2)
    one.choose(MOST, 0, 1000)
    without_trials(pair)
    thought.clear()
    assert [one.choose(MOST, 0, 1000) for _ in range(10 * (rests + 1))] == [0] * 10 * (rests + 1)
    assert 10 <= len(thought) <= 11


def drafts_steadily() -> Goodput:
    """Drafting is much better, and no trial is near."""
    pair = known_pair([1 + 0.1 * k for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = settled(pair, 0.9)
    (trials,) = pair._trials.values()
    trials.drafted, trials.doubts = True, FAR
    assert all(accepted(one, 2 * (REST + 1)))
    return one


def accepted(one: Goodput, count: int) -> list[int]:
    """K of so many rounds, all of whose draft tokens are accepted."""
    chosen = []
    for _ in range(count):
        k = one.choose(MOST, 0, 1000)
        one.asks(0)
        one.proposed(k, 0.1, 0)
        one.verifying(k, prefills=False)
        one.judged(k, k, Verification(1 + 0.1 * k, k + 1, 1))
        chosen.append(k)
    return chosen


def test_nor_is_there_much_to_think_about_while_all_draft(thought: list[int]) -> None:
    one = drafts_steadily()
    thought.clear()
    assert all(accepted(one, 40 * (REST + 1)))
    assert 40 <= len(thought) <= 44
    assert one.choose(2, 0, 1000) <= 2, "what can be used is not exceeded"


def test_who_drafts_thinks_where_it_would_have_to_catch_up(thought: list[int]) -> None:
    one = drafts_steadily()
    one.choose(MOST, 0, 1000)
    for _ in range(4):
        thought.clear()
        one.choose(MOST, 100, 1000)
        assert thought


def test_who_drafts_stops_when_all_do(thought: list[int]) -> None:
    one = drafts_steadily()
    accepted(one, 1)
    assert one._rest
    one.pair.agreement.drafts = False
    thought.clear()
    one.choose(MOST, 0, 1000)
    assert thought


@pytest.mark.parametrize("drafting", [False, True])
def test_whether_things_are_as_they_were_is_asked_when_it_is_due(drafting: bool) -> None:
    """However many rounds were begun without thinking."""
    trials = Trials.of(1)
    trials.next, trials.drafted = 10**9, drafting
    agreement = plain_is_far_behind()
    agreement.drafts, asked = drafting, 0
    for _ in range(10 * TRIAL_DOUBT):
        if not trials.rest(drafting):
            before = trials.doubts
            trials.step(agreement, 1, known=True, reading=False)
            asked += trials.doubts > before
    assert asked == 10


def test_rounds_without_thinking_are_rounds() -> None:
    """The next trial begins when it is due, not when somebody happens to think."""
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = settled(pair, 0.3)
    assert one.choose(MOST, 0, 1000) == 0
    trials = pair._trials[0]
    trials.number, trials.next = 4, trials.rounds + 10
    share = one.pair.agreement.rate / one.pair.agreement.plain_rate
    assert share > 0.0
    begun = 0
    while trials.number == 4:
        one.choose(MOST, 0, 1000)
        begun += 1
    assert begun == 10


def test_a_trial_wakes_who_rests() -> None:
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1))
    one = settled(pair, 0.9)
    assert rounds(one, 2) == [0, 0]
    assert one._rest
    pair._trials[0].next = 0
    assert rounds(one, 1) != [0]


@pytest.mark.parametrize(
    ("size", "left", "counts"), [(32, 30, True), (32, 28, False), (8, 7, True), (8, 6, False)]
)
def test_times_of_fewer_than_those_on_trial_say_nothing_of_it(size: int, left: int, counts: bool) -> None:
    """At the end of a burst passes are short for whatever is done: a draft on trial then would seem quick."""
    pair = known_pair([1.0 + k for k in range(MOST + 1)], [0.1] * (MOST + 1), size)
    members = crowd(pair, size, 0.5)
    while pair.trial is None or not pair.settled:
        members[0].choose(MOST, 0, 1000)
    for one in members[left:]:
        one.leave()
    for one in members[:left]:
        one.verifying(0, prefills=False)
    before = pair.costs.at(size).verdict.cells[0].seconds
    for one in members[:left]:
        one.judged(0, 0, Verification(0.01, left, left))
    assert pair.trial is not None
    assert (pair.costs.at(size).verdict.cells[0].seconds < before) is counts


def on_trial(pair: Pair, one: Goodput) -> Trial:
    """The first trial of its load."""
    while pair.trial is None:
        one.choose(MOST, 0, 1000)
    return pair.trial


def test_a_trial_whose_draft_is_gone_is_given_up_and_made_later() -> None:
    """Rounds without a draft are not chosen: the trial would last, and nothing be learned of all else."""
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1))
    (one,) = crowd(pair, 1, 0.5)
    trial, number = on_trial(pair, one), pair._trials[0].number
    for _ in range(PATIENCE * (TRIAL_DRAFTING + TRIAL_WAITS)):
        assert pair.trial is trial
        one.verifying(0, prefills=False)
        one.judged(0, 0, Verification(1.0, 1, 1))
    one.verifying(0, prefills=False)
    one.judged(0, 0, Verification(1.0, 1, 1))
    assert pair.trial is None
    again = on_trial(pair, one)
    assert again.num_draft == trial.num_draft
    assert pair._trials[0].number == number


@pytest.mark.parametrize("fixed", [0, 4])
def test_a_trial_is_of_those_whose_k_is_chosen(fixed: int) -> None:
    """What others make would be taken for what the trial makes, and their rounds for its length."""
    pair = known_pair([1.0 * (k + 1) for k in range(MOST + 1)], [0.1] * (MOST + 1), 8)
    members = [*crowd(pair, 2, 0.5), *(Fixed(pair, fixed) for _ in range(6))]
    for one in members[2:]:
        one.verifying(fixed, prefills=False)
    while pair.trial is None:
        for one in members:
            one.choose(MOST, 0, 1000)
    trial = pair.trial
    assert trial.size == 2
    assert trial.until - pair._trials[3].rounds <= 2 * TRIAL_PLAIN
    for one in members[2:]:
        one.proposed(fixed, 1.0, 0)
        one.judged(fixed, fixed, Verification(1.0, 8, 8))
    assert (trial.made, trial.seconds) == (0, 0.0)
    members[0].proposed(2, 1.0, 0)
    members[0].judged(2, 1, Verification(1.0, 8, 8))
    assert (trial.made, trial.seconds) == (2, 2.0)


@pytest.mark.parametrize(
    ("clients", "left", "load"),
    [(2, 1, 0), (3, 2, 1), (5, 4, 3), (5, 3, 2), (8, 7, 3), (9, 8, 4), (9, 7, 3), (17, 16, 5), (17, 15, 4)],
)
def test_one_that_is_between_two_requests_makes_no_other_load(clients: int, left: int, load: int) -> None:
    """Of nine clients eight are there now and then: that would interrupt whatever is compared."""
    pair = Pair(MOST)
    members = crowd(pair, clients)
    before = pair.costs.at(pair.crowd)
    for one in members[left:]:
        one.leave()
    assert pair.load == load
    assert (pair.costs.at(pair.crowd) is before) is (load == bracket(clients))
    for one in members[left:]:
        one.verifying(0, prefills=False)
    assert pair.load == bracket(clients)


@given(st.integers(1, 4096))
def test_a_load_begins_with_its_least(sequences: int) -> None:
    load = bracket(sequences)
    assert least(load) <= sequences
    assert bracket(least(load)) == load
    assert least(load) == 1 or bracket(least(load) - 1) == load - 1
