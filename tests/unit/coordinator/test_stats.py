"""Counts against a slow count over the list of rounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coordinator.api.http.openai.usage import summed
from coordinator.sequence.stats import RoundTimes, SourceStats, SpeculationStats
from paceline.core.types import Timings
from tests.sim.rounds import judged_chain


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_a_slow_count(seed: int) -> None:
    rng = random.Random(seed)
    rounds = [(k, rng.randint(0, k)) for k in (rng.randint(0, 5) for _ in range(rng.randint(0, 30)))]
    stats = SpeculationStats()
    for k, accepted in rounds:
        stats.record(judged_chain(k, accepted))
    with_proposal = [(k, a) for k, a in rounds if k]
    longest = max((k for k, _ in with_proposal), default=-1)
    assert stats.num_rounds == len(rounds)
    assert stats.num_spec_steps == len(with_proposal)
    assert stats.num_draft_tokens == sum(k for k, _ in rounds)
    assert stats.num_accepted_draft_tokens == sum(a for _, a in rounds)
    assert stats.histogram == [
        sum(a == i for _, a in with_proposal) for i in range(longest + 1 if with_proposal else 0)
    ]
    for i in range(max(longest, 0)):
        reached = [(k, a) for k, a in with_proposal if k > i and a >= i]
        taken = [(k, a) for k, a in reached if a > i]
        rate = len(taken) / len(reached) if reached else 0.0
        assert stats.acceptance_rate_per_position[i] == rate
    drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
    assert stats.acceptance_rate == (accepted / drafted if drafted else 0.0)
    per_round = accepted / len(with_proposal) if with_proposal else 0.0
    assert stats.mean_acceptance_length == pytest.approx(1 + per_round)


def test_accepted_tokens_are_counted_by_rank() -> None:
    stats, other = SpeculationStats(), SpeculationStats()
    assert stats.accepted_per_rank == []
    stats.record(replace(judged_chain(3, 2), accepted_ranks=(0, 2)))
    stats.record(replace(judged_chain(3, 1), accepted_ranks=(0,)))
    stats.record(judged_chain(3, 0))
    assert stats.accepted_per_rank == [2, 0, 1]
    other.record(replace(judged_chain(1, 1), accepted_ranks=(1,)))
    assert summed([stats, other]).accepted_per_rank == [2, 1, 1]


def test_without_drafts_the_mean_length_is_one() -> None:
    stats = SpeculationStats()
    stats.record(judged_chain(0, 0))
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (0.0, 1.0)
    assert stats.acceptance_rate_per_position == []


def test_draft_tokens_after_the_end_are_not_judged() -> None:
    stats = SpeculationStats()
    stats.record(replace(judged_chain(8, 4), num_judged=4, num_tokens=4))
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (8, 4)
    assert stats.mean_acceptance_length == 4
    assert stats.histogram == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert stats.reached == stats.accepted_at == [1, 1, 1, 1, 0, 0, 0, 0]


def test_hits_and_copies_of_committed_rounds_are_counted() -> None:
    stats = SpeculationStats()
    stats.record(replace(judged_chain(2, 0), hit=True))
    stats.record(replace(judged_chain(2, 0), source="prompt-lookup"))
    assert (stats.num_lookahead_hits, stats.num_prompt_lookups) == (1, 1)


def test_rounds_are_counted_by_the_source_of_their_proposal() -> None:
    stats = SpeculationStats()
    stats.record(judged_chain(0, 0))
    stats.record(judged_chain(3, 1))
    stats.record(replace(judged_chain(2, 2), source="constant"))
    for accepted in (0, 1):
        stats.record(replace(judged_chain(4, accepted), source="prompt-lookup"))
    assert stats.by_source == {
        "draft": SourceStats(1, 3, 1),
        "constant": SourceStats(1, 2, 2),
        "prompt-lookup": SourceStats(2, 8, 1),
    }
    assert stats.num_prompt_lookups == 2
    assert summed([stats, stats]).by_source["constant"] == SourceStats(2, 4, 4)


def test_times_are_split_and_add_up() -> None:
    times = RoundTimes()
    times.draft_answered(1.0, Timings(queue=0.25, compute=0.5))
    times.target_answered(2.0, Timings(queue=0.5, compute=1.0))
    times.coordinator += 0.125
    assert (times.draft, times.target, times.queue, times.wire) == (0.5, 1.0, 0.75, 0.75)
    assert times.total == 3.125


def test_wire_time_is_never_negative() -> None:
    times = RoundTimes()
    times.target_answered(0.5, Timings(queue=0.5, compute=0.5))
    assert times.wire == 0
