"""The `usage` of an answer, and the counts of its speculation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from coordinator.requests.generation import Generation
from coordinator.round.machine import RoundMachine
from coordinator.sequence.stats import SpeculationStats


def usage_so_far(generations: Sequence[Generation], completion_tokens: int) -> dict[str, Any]:
    """Token counts of one request: each prompt once, and the completions of all choices together."""
    prompt = sum(generation.params.prompt_length for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }


def _cached(generations: Sequence[Generation]) -> int:
    """Prompt tokens that the target had cached, counted with the first choice of each prompt."""
    return sum(generation.machines[0].state.stats.cached_prompt_tokens for generation in generations)


def choice_stats(machine: RoundMachine) -> dict[str, Any]:
    """Speculation counts of one choice, in vLLM's form."""
    stats = machine.state.stats
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": {str(i): count for i, count in enumerate(stats.histogram) if count},
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": machine.state.planner.num_speculative_tokens,
    }


def usage(generations: Sequence[Generation], *, include_speculative_decoding: bool) -> dict[str, Any]:
    """Final token counts: `usage_so_far`, and the prompt tokens that the target had cached."""
    machines = [machine for generation in generations for machine in generation.machines]
    counts = usage_so_far(generations, sum(machine.state.ledger.num_generated for machine in machines))
    counts["prompt_tokens_details"] = {"cached_tokens": _cached(generations)}
    if include_speculative_decoding:
        total = summed(machine.state.stats for machine in machines)
        counts["speculative_decoding"] = {
            "acceptance": generations[0].params.mode.value,
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.acceptance_rate,
            "acceptance_rate_per_position": total.acceptance_rate_per_position,
            "acceptance_histogram": total.histogram,
            "accepted_per_rank": total.accepted_per_rank,
            "num_rounds": total.num_rounds,
            "num_spec_steps": total.num_spec_steps,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_draft_tokens": total.num_accepted_draft_tokens,
            "num_lookahead_hits": total.num_lookahead_hits,
            "num_prompt_lookups": total.num_prompt_lookups,
            "by_source": {source: asdict(counts) for source, counts in total.proposing.items()},
        }
    return counts


def summed(each: Iterable[SpeculationStats]) -> SpeculationStats:
    """The sum of several sequences' counts."""
    total = SpeculationStats()
    for stats in each:
        total.num_rounds += stats.num_rounds
        total.num_spec_steps += stats.num_spec_steps
        total.num_step_tokens += stats.num_step_tokens
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_accepted_draft_tokens += stats.num_accepted_draft_tokens
        total.num_lookahead_hits += stats.num_lookahead_hits
        for source, counts in stats.by_source.items():
            total.by_source[source].add(counts)
        total.histogram = _sum(total.histogram, stats.histogram)
        total.reached = _sum(total.reached, stats.reached)
        total.accepted_at = _sum(total.accepted_at, stats.accepted_at)
        total.accepted_per_rank = _sum(total.accepted_per_rank, stats.accepted_per_rank)
    return total


def _sum(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
