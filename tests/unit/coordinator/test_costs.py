"""The measured costs of a round against closed forms and brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.costs import MANY, SCATTERED, SCATTERED_FEW, Copies, Costs, Load, bracket, weight
from coordinator.curves import FADED, MEMORY, Cell, Curve, Shape, rising
from paceline.core.lines import Line


def curve(*points: tuple[float, float], times: int = 50) -> Curve:
    """A curve that has seen every point often."""
    result = Curve(growth=0.1, outlier=3.0)
    for x, y in points:
        for _ in range(times):
            result.observe(x, y)
    return result


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (64, 6), (65, 7)],
)
def test_loads_double(sequences: int, expected: int) -> None:
    assert bracket(sequences) == expected


def test_a_cell_is_a_mean_that_forgets() -> None:
    cell = Cell()
    for i in range(10):
        cell.observe(2.0, float(i), 1.0)
    assert (cell.tokens, cell.seconds) == pytest.approx((2.0, 4.5))
    for _ in range(1000):
        cell.observe(2.0, 7.0, 1.0)
    assert cell.weight == MEMORY
    assert cell.seconds == pytest.approx(7.0)


def test_a_straight_line_is_found() -> None:
    points = [(k, 3.0 + 0.5 * k) for k in (0, 2, 4, 7)]
    seconds = curve(*points).seconds(10)
    assert seconds == pytest.approx([3.0 + 0.5 * k for k in range(11)])


def test_what_was_measured_wins_over_the_line() -> None:
    """A step at the first draft token, which no line can have."""
    seconds = curve((0, 1.0), *((k, 2.0 + 0.1 * k) for k in (1, 2, 3, 4))).seconds(4)
    assert seconds is not None
    assert seconds[0] == pytest.approx(1.0, abs=0.05)
    assert seconds[1:] == pytest.approx([2.0 + 0.1 * k for k in (1, 2, 3, 4)], rel=0.1)


def test_one_point_has_the_shape_of_another_load_or_of_experience() -> None:
    alone = curve((2, 6.0))
    like = Shape(Line(2.0, 2.0), 1.0)
    assert alone.shape() == Shape(Line(pytest.approx(5.0), pytest.approx(0.5)), pytest.approx(5.0))
    assert alone.shape(like) == Shape(Line(pytest.approx(2.0), pytest.approx(2.0)), pytest.approx(1.0))
    plain = curve((0, 3.0))
    assert plain.shape() == Shape(Line(3.0, pytest.approx(0.3)), 3.0, guessed=True)
    assert plain.shape(like) == Shape(Line(6.0, 6.0), 3.0)
    assert curve().shape(like) == like


def test_plain_rounds_say_nothing_of_what_a_draft_token_takes() -> None:
    """They follow one another without messages; the first draft token costs more than the others."""
    assert curve((0, 1.0), (2, 6.0), (4, 7.0)).seconds(6) == pytest.approx(
        [1.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0]
    )


def test_rows_never_take_less_time_than_none() -> None:
    costs = Costs()
    for k, seconds in ((0, 3.0), (2, 2.0)):
        for _ in range(50):
            costs.at(1).judged(k, seconds, trial=True)
    table = costs.round_seconds(1, 4)
    assert table is not None
    assert table.verify == pytest.approx([3.0] * 5)


def test_drafting_more_never_takes_less_time_and_decoding_takes_some() -> None:
    falling = curve((1, 5.0), (4, 1.0)).seconds(6)
    assert falling == sorted(falling)  # type: ignore[type-var, arg-type]
    steep = curve((4, 1.0), (5, 100.0)).shape()
    assert steep is not None
    assert steep.line.at(0) >= 0


def test_a_stall_is_not_believed() -> None:
    seen = curve((1, 1.0))
    seen.observe(1, 1000.0)
    assert seen.cells[1].seconds < 1.1


def test_a_wait_after_many_hits_is_believed() -> None:
    """Drafting that was foreseen takes nothing, and nothing times three is nothing."""
    drafting = Costs().at(1).drafting
    for _ in range(50):
        drafting.observe(2, 0.0)
    for _ in range(50):
        drafting.observe(2, 1.0)
    assert drafting.cells[2].seconds == pytest.approx(0.5, abs=0.1)


def test_one_sequence_that_drafts_is_not_plain_decoding() -> None:
    """It splits the pass of the others, so that the time must not count as theirs without it."""
    seen = curve((0, 1.0))
    for _ in range(50):
        seen.observe(0.2, 5.0)
    assert seen.cells[0].seconds == 1.0


def test_faded_measurements_give_way_to_new_ones() -> None:
    seen = curve((0, 9.0))
    seen.fade(0)
    assert seen.cells[0].weight == FADED
    for _ in range(12):
        seen.observe(0, 1.0)
    assert seen.cells[0].seconds == pytest.approx((FADED * 9 + 12) / (FADED + 12))


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=7))
def test_rising_is_the_nearest_that_never_falls(values: list[float]) -> None:
    result = rising(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(result))
    best = math.inf
    for cuts in itertools.product((True, False), repeat=len(values) - 1):
        blocks, start = [], 0
        for i, cut in enumerate((*cuts, True), 1):
            if cut:
                blocks.append(values[start:i])
                start = i
        means = [sum(block) / len(block) for block in blocks]
        if all(a <= b + 1e-9 for a, b in itertools.pairwise(means)):
            error = sum((v - m) ** 2 for block, m in zip(blocks, means, strict=True) for v in block)
            best = min(best, error)
    assert sum((v - r) ** 2 for v, r in zip(values, result, strict=True)) == pytest.approx(best)


def test_nothing_is_known_at_first() -> None:
    costs = Costs()
    assert costs.round_seconds(1, 4) is None
    assert not costs.knows_drafting(1)


def test_a_round_is_the_wait_for_the_draft_and_the_verdict() -> None:
    costs = Costs()
    for k in range(5):
        for _ in range(50):
            costs.at(1).verdict.observe(k, 10.0 + k)
            if k:
                costs.at(1).drafting.observe(k, 2.0 + k)
    table = costs.round_seconds(1, 4)
    assert table is not None
    seconds = table.whole
    assert table.verify == pytest.approx([10.0 + k for k in range(5)], rel=0.05)
    assert seconds[0] == pytest.approx(10.0, rel=0.05)
    assert seconds[1:] == pytest.approx([12.0 + 2 * k for k in range(1, 5)], rel=0.05)


def test_rows_of_a_pass_take_as_long_at_another_load() -> None:
    like = Shape(Line(2.0, 2.0), 1.0)
    assert like.among(8.0) == Shape(Line(9.0, 16.0), 1.0)
    plain = Curve(0.1, 3.0, of_rows=True, cells=curve((0, 3.0)).cells)
    assert plain.shape(like) == Shape(Line(4.0, 2.0), 3.0)
    # Four rows of a sequence take six seconds: two more cannot take eight.
    steep = Shape(Line(0.0, 4.0), 1.0)
    alone = Curve(0.1, 3.0, of_rows=True, cells=curve((3, 6.0)).cells).shape(steep)
    assert alone is not None
    assert alone.line == Line(pytest.approx(1.5), pytest.approx(1.5))


@pytest.mark.parametrize(
    ("sequences", "least"), [(1, 0.0), (8, 0.0), (16, 9 * 0.5), (32, 17 * 0.5), (60, 33 * 0.5)]
)
def test_among_more_sequences_draft_tokens_take_a_part_of_what_rows_of_prompts_take(
    sequences: int, least: float
) -> None:
    """Once: four draft tokens seemed to add next to nothing among 32, for they did among 8 for a moment."""
    costs = Costs()
    for tokens, seconds in ((0, 5.0), (1, 6.0), (4, 6.1)):
        for _ in range(20):
            costs.at(8).judged(tokens, seconds, trial=True)
    known, told = costs.round_seconds(sequences, 4), costs.round_seconds(sequences, 4, row=1.0)
    assert known is not None
    assert told is not None
    slope = (told.verify[4] - told.verify[2]) / 2
    assert slope == pytest.approx(max((known.verify[4] - known.verify[2]) / 2, least))
    assert told.verify[0] == known.verify[0]


@pytest.mark.parametrize("times", [0.25, 1.0, 4.0, 16.0])
def test_draft_tokens_that_seem_to_take_less_than_none_take_no_less_among_many(times: float) -> None:
    """Once: a plain round that was slow by chance, times four, and drafting four tokens was free among 32."""
    shape = Shape(Line(6.0, 2.0), plain=10.0).among(times)
    assert shape.plain == 10.0
    assert shape.line.slope == 2.0 * times
    assert shape.line.intercept == pytest.approx(10.0 - 4.0 * min(times, 1.0))


@pytest.mark.parametrize(("told", "slope"), [(0.0, 0.5), (0.1, 0.5), (1.0, 1.0), (9.0, 2.0)])
def test_one_point_has_the_slope_that_is_told_within_reason(told: float, slope: float) -> None:
    """At least that of experience, at most that of a pass that takes nothing but rows."""
    shape = curve((2, 6.0)).shape(slope=told)
    assert shape is not None
    assert shape.line.slope == pytest.approx(slope)


def test_draft_tokens_take_what_rows_of_prompts_take_until_more_is_known() -> None:
    """Once: among sixteen 7 tokens seemed to take a third longer than the 2 of their first trial."""
    costs = Costs()
    for _ in range(50):
        costs.at(16).judged(0, 7.0, trial=True)
        costs.at(16).judged(2, 20.0, trial=True)
    table = costs.round_seconds(16, 7, row=0.4)
    assert table is not None
    assert table.verify[7] == pytest.approx(20.0 + 5 * 16 * 0.4, rel=0.03)


def test_a_guess_is_not_taken_to_another_load() -> None:
    """Plain rounds of one sequence say nothing of what the draft tokens of sixteen take."""
    costs = Costs()
    for _ in range(50):
        costs.at(1).judged(0, 2.0, trial=True)
        costs.at(16).judged(0, 3.0, trial=True)
        costs.at(16).judged(2, 4.0, trial=True)
    table = costs.round_seconds(16, 7)
    assert table is not None
    assert table.verify[7] == pytest.approx(4.0 + 5 * 4.0 / 12, rel=0.03)


def test_many_draft_tokens_are_many_rows() -> None:
    """Once: draft tokens of sixteen seemed to take the share of a pass that those of one sequence take."""
    costs = Costs()
    for _ in range(50):
        for k in range(5):
            costs.at(1).judged(k, 2.0 + 0.4 * k, trial=True)
        costs.at(16).judged(0, 6.4, trial=True)
    table = costs.round_seconds(16, 4)
    assert table is not None
    assert table.verify[4] == pytest.approx(6.4 + 16 * 1.6, rel=0.03)


def test_a_load_that_was_not_measured_is_like_the_nearest() -> None:
    costs = Costs()
    for k in range(5):
        for _ in range(50):
            costs.at(4).verdict.observe(k, 10.0 + 5 * k)
            costs.at(64).verdict.observe(k, 100.0)
            costs.at(8).verdict.observe(0, 40.0)
    table = costs.round_seconds(8, 4)
    assert table is not None
    seconds = table.whole
    assert seconds[4] - seconds[0] == pytest.approx(2 * 20.0, rel=0.05)


def test_a_stall_while_little_is_known_does_not_speak_against_drafting_for_good() -> None:
    """Once: one proposal of a load's first trial that took long, and it was never tried there again."""
    load = Load()
    for _ in range(20):
        load.judged(0, 10.0)
    for seconds in (5.0, 5.0, 150.0, 5.0):
        load.proposed(2, seconds)
    assert load.drafting.cells[2].seconds == pytest.approx((3 * 5.0 + 30.0) / 4, rel=0.01)
    slow = Load()
    for _ in range(20):
        slow.judged(0, 10.0)
    for _ in range(200):
        slow.proposed(2, 80.0)
    assert slow.drafting.cells[2].seconds == pytest.approx(80.0, rel=0.15), "a slow draft is one"


def paced(speed: float, *, trial: bool = False) -> Costs:
    """Rounds of 10 s, and of 20 s with 4 draft tokens, 5 s of them waited for; then plain ones, slower."""
    costs = Costs()
    load = costs.at(1)
    for _ in range(50):
        load.judged(0, 10.0)
    for _ in range(50):
        load.judged(4, 15.0, trial=True)
        load.proposed(4, 5.0)
    for _ in range(100):
        load.judged(0, 10.0 * speed, trial=trial)
    return costs


@pytest.mark.parametrize("speed", [0.5, 1.0, 1.5, 1.7])
def test_what_makes_everything_slower_makes_slower_what_is_not_done(speed: float) -> None:
    table = paced(speed).round_seconds(1, 4)
    assert table is not None
    assert table.whole[0] == pytest.approx(10 * speed, rel=0.02)
    # A leap like that is partly taken for the price of plain rounds: a sixth of it here, at most.
    assert table.whole[4] == pytest.approx(20 * speed, rel=0.2)
    assert table.verify[4] == pytest.approx(15 * speed, rel=0.2)


@pytest.mark.parametrize(("known", "slower"), [(8, 1.1), (1000, 1.25)])
def test_how_slow_everything_is_shows_in_what_is_well_known(known: int, slower: float) -> None:
    """The first rounds of a kind may have been cheaper than they turn out to be: that is no slow machine."""
    costs = Costs()
    load = costs.at(1)
    for _ in range(50):
        load.judged(0, 10.0)
    for _ in range(known):
        load.judged(4, 15.0, trial=True)
    for _ in range(60):
        load.judged(4, 22.0)
    table = costs.round_seconds(1, 4)
    assert table is not None
    assert table.whole[4] == pytest.approx(22, rel=0.1)
    assert (table.whole[0] > 10 * slower) is (known > MEMORY)


@given(sequences=st.integers(2, 64), row=st.floats(0.0, 1.5), pace=st.floats(0.5, 2.0))
def test_what_copies_add_to_plain_passes_is_measured(sequences: int, row: float, pace: float) -> None:
    costs = Costs()
    load = costs.at(sequences)
    for _ in range(50):
        load.judged(0, 10.0)
    load.pace = pace
    for i in range(500):
        more = (0.0, 0.25, 1.5)[i % 3]
        load.copied(more, 10.0 * pace * (1 + row * more))
    table = costs.round_seconds(sequences, 4)
    assert table is not None
    for k, seconds in enumerate(table.copied):
        assert seconds == pytest.approx(10.0 * pace * (1 + row * k), rel=0.3)
        assert k or seconds == pytest.approx(table.verify[0])
    assert table.copied == sorted(table.copied)


def test_copies_are_judged_by_what_all_wait_while_plain_passes_alone_are_known() -> None:
    costs = Costs()
    for sequences in (MANY - 1, MANY):
        for k in range(5):
            costs.at(sequences).verdict.observe(k, 10.0 + 9.0 * k)
        for _ in range(50):
            costs.at(sequences).copied(0.0, 10.0)
    few, many = costs.round_seconds(MANY - 1, 4), costs.round_seconds(MANY, 4)
    assert few is not None
    assert many is not None
    assert few.copied == pytest.approx([few.verify[0] * (1 + SCATTERED_FEW * k) for k in range(5)])
    assert many.copied == [max(t, many.verify[0] * (1 + SCATTERED * k)) for k, t in enumerate(many.verify)]
    alone = Costs()
    alone.at(1).judged(0, 10.0)
    table = alone.round_seconds(1, 4)
    assert table is not None
    assert table.copied == table.verify


def test_one_stall_says_little_of_what_copies_cost() -> None:
    copies = Copies()
    for more in (0.0, 1.0) * 20:
        copies.observe(more, 10.0 + 5 * more, 1.0)
    copies.observe(1.0, 10_000.0, 1.0)
    assert copies.copied.seconds < 17
    copies.observe(0.0, 10_000.0, 1.0)
    assert copies.plain.seconds < 12


def test_on_trial_the_draft_tokens_make_the_difference() -> None:
    table = paced(1.7, trial=True).round_seconds(1, 4)
    assert table is not None
    assert table.whole[0] > 15
    assert table.whole[4] == pytest.approx(20, rel=0.05)
    assert table.whole[0] == pytest.approx(17, rel=0.2)


def test_one_stall_says_little_of_how_fast_everything_is() -> None:
    costs = paced(1.0)
    costs.at(1).judged(0, 10_000.0)
    assert 1.0 < costs.at(1).pace < 1.2


def test_a_load_that_was_not_measured_is_like_the_nearest_as_it_is_now() -> None:
    table = paced(2.0).round_seconds(2, 4)
    assert table is not None
    assert table.whole[0] == pytest.approx(20, rel=0.03)
    assert table.whole[4] == pytest.approx(40, rel=0.27)


def test_who_does_not_draft_beside_others_saves_no_more_than_a_token() -> None:
    costs = Costs()
    for k, seconds in ((0, 10.0), (1, 30.0), (2, 32.0), (3, 34.0), (4, 36.0)):
        for _ in range(80):
            costs.at(1).verdict.observe(k, seconds)
    table = costs.round_seconds(1, 4)
    assert table is not None
    assert table.whole[0] < 15
    assert table.beside == pytest.approx(28, rel=0.1)
    assert table.beside_drafts == [table.beside, *table.whole[1:]]
    alone = costs.round_seconds(1, 1)
    assert alone is not None
    assert alone.beside == alone.whole[0], "with one draft token nothing is known of another"


def test_drafting_is_known_here_or_next_door() -> None:
    costs = Costs()
    costs.at(1).drafting.observe(2, 0.1)
    assert costs.knows_drafting(1)
    assert costs.knows_drafting(2)
    assert not costs.knows_drafting(3)
    assert not costs.knows_drafting(64)


def test_sequences_of_one_pass_tell_nearly_the_same() -> None:
    assert weight(1) == 1
    assert weight(0) == 1
    assert weight(64) * 64 == 8


@pytest.mark.parametrize("spread", [0.2, 0.4, 0.6])
def test_chance_moves_neither_what_is_known_nor_the_pace(spread: float) -> None:
    """Once: of each time the pace took its part first. A long one seemed shorter for that, so what was done
    for long seemed ever faster, on a machine that became ever slower: after ten thousand rounds, by 1.4, and
    so did all that was not done meanwhile."""
    rng, load = random.Random(1), Load()
    for tokens, seconds in ((0, 3e-3), (4, 9e-3)):
        for _ in range(100):
            load.judged(tokens, seconds)
    for _ in range(20_000):
        load.judged(0, 3e-3 * rng.lognormvariate(-(spread**2) / 2, spread))
    found = load.seconds(load.verdict, 4, None)
    assert found is not None
    assert found[4] / found[0] == pytest.approx(3, rel=0.15)
    assert found[0] == pytest.approx(3e-3, rel=0.35), "of the last rounds"
    assert load.pace == pytest.approx(1, rel=0.35)
