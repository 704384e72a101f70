"""Which rows the next pass feeds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.scheduling.planner import PREFILL_SHARE, SCORED_ROWS, Chunk, Feed, plan_pass

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Feed], int]:
    budget = draw(st.integers(2, 20))
    feeds = []
    for i in range(draw(st.integers(0, 8))):
        rows = draw(st.integers(1, budget))
        longer = draw(st.sampled_from([0, 0, 1, 3, 50]))
        feeds.append(Feed(f"s{i}", rows + longer, rows, scored=draw(st.booleans())))
    return feeds, budget


@SETTINGS
@given(workloads())
def test_a_plan_fits_its_budget_and_keeps_wanted_rows_together(workload: tuple[list[Feed], int]) -> None:
    feeds, budget = workload
    chunks = plan_pass(feeds, budget)
    by_id = {feed.sequence_id: feed for feed in feeds}
    assert sum(chunk.count for chunk in chunks) <= budget
    assert len({chunk.sequence_id for chunk in chunks}) == len(chunks)
    assert bool(chunks) == bool(feeds)
    for chunk in chunks:
        feed = by_id[chunk.sequence_id]
        assert chunk.count >= 1
        if chunk.final:
            assert chunk.count == feed.remaining
        else:
            # All rows whose logits are wanted are left for one later chunk.
            assert chunk.count <= feed.remaining - feed.rows


@SETTINGS
@given(workloads())
def test_the_oldest_feed_always_progresses(workload: tuple[list[Feed], int]) -> None:
    feeds, budget = workload
    if feeds:
        assert feeds[0].sequence_id in {chunk.sequence_id for chunk in plan_pass(feeds, budget)}


def advance(feeds: list[Feed], chunks: list[Chunk]) -> list[Feed]:
    """What is left after a pass, in the same order."""
    counts = {chunk.sequence_id: chunk.count for chunk in chunks}
    left = [replace(f, remaining=f.remaining - counts.get(f.sequence_id, 0)) for f in feeds]
    return [feed for feed in left if feed.remaining]


@SETTINGS
@given(workloads())
def test_everything_is_fed_in_the_end(workload: tuple[list[Feed], int]) -> None:
    feeds, budget = workload
    for _ in range(len(feeds) + sum(feed.remaining for feed in feeds)):
        feeds = advance(feeds, plan_pass(feeds, budget))
    assert feeds == []


def test_scored_feeds_share_their_own_budget() -> None:
    """Each of their rows takes a vocabulary's width of memory."""
    feeds = [
        Feed("a", 300, 1, scored=True),
        Feed("b", 900, 1, scored=True),
        Feed("c", 3, 3),
        Feed("d", 900, 1),
    ]
    passes = []
    while feeds:
        passes.append(plan_pass(feeds, 1000))
        feeds = advance(feeds, passes[-1])
    assert passes[0] == [
        Chunk("c", 3, final=True),
        Chunk("a", SCORED_ROWS, final=False),
        Chunk("d", 997 - SCORED_ROWS, final=False),
    ]
    scored = [sum(chunk.count for chunk in chunks if chunk.sequence_id in "ab") for chunks in passes]
    assert max(scored) == SCORED_ROWS
    assert sum(scored) == 1200


def test_short_feeds_go_before_prefill_chunks() -> None:
    feeds = [Feed("long", 100, 1), Feed("a", 3, 3), Feed("b", 1, 1)]
    assert plan_pass(feeds, 8) == [
        Chunk("a", 3, final=True),
        Chunk("b", 1, final=True),
        Chunk("long", 4, final=False),
    ]


def test_streams_wait_for_a_limited_part_of_a_prompt() -> None:
    """Without streams a prompt may take the whole budget."""
    feeds = [Feed("long", 1500, 1), Feed("other", 300, 1), Feed("a", 5, 5)]
    assert plan_pass(feeds, 512, 64) == [Chunk("a", 5, final=True), Chunk("long", 64, final=False)]
    assert plan_pass(feeds[:2], 512) == [Chunk("long", 512, final=False)]
    assert plan_pass([Feed("a", 5, 5), Feed("short", 40, 1), Feed("other", 300, 1)], 512, 64) == [
        Chunk("a", 5, final=True),
        Chunk("short", 40, final=True),
        Chunk("other", 24, final=False),
    ]


def test_no_more_room_is_kept_for_a_prompt_than_it_may_use() -> None:
    feeds = [Feed("long", 1500, 1), *(Feed(f"{i}", 7, 7) for i in range(64))]
    chunks = plan_pass(feeds, 512, 16)
    assert len(chunks) == 65
    assert chunks[-1] == Chunk("long", 16, final=False)
    assert sum(chunk.count for chunk in plan_pass(feeds, 448, 16)) == 61 * 7 + 16, "but that is kept"


@SETTINGS
@given(workloads(), st.integers(1, 40))
def test_everything_is_fed_with_little_room_beside_streams(
    workload: tuple[list[Feed], int], beside: int
) -> None:
    feeds, budget = workload
    for _ in range(len(feeds) + sum(feed.remaining for feed in feeds)):
        feeds = advance(feeds, plan_pass(feeds, budget, beside))
    assert feeds == []


def test_the_last_chunk_holds_all_wanted_rows() -> None:
    assert plan_pass([Feed("a", 9, 4)], 8) == [Chunk("a", 5, final=False)]
    assert plan_pass([Feed("a", 4, 4)], 8) == [Chunk("a", 4, final=True)]
    assert plan_pass([Feed("a", 8, 4)], 8) == [Chunk("a", 8, final=True)]


@pytest.mark.parametrize("seed", range(5))
def test_no_stream_of_short_feeds_starves_a_prefill(seed: int) -> None:
    """With as many short feeds as the budget in every pass."""
    rng, budget = random.Random(seed), 40
    feeds = [Feed("prefill", 200, 1)]
    for n in range(200 * PREFILL_SHARE // budget + 2):
        while sum(feed.remaining for feed in feeds if feed.sequence_id != "prefill") < 3 * budget:
            rows = rng.randint(1, 9)
            feeds.append(Feed(f"{n}.{len(feeds)}", rows, rows))
        feeds = advance(feeds, plan_pass(feeds, budget))
    assert all(feed.sequence_id != "prefill" for feed in feeds)


def test_no_stream_of_prefills_starves_a_wide_verification() -> None:
    feeds = [Feed("wide", 33, 33)]
    for n in range(3):
        feeds.append(Feed(f"prefill{n}", 500, 1))
        feeds = advance(feeds, plan_pass(feeds, 33))
    assert all(feed.sequence_id != "wide" for feed in feeds)
