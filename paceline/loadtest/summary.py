"""The figures of a load test: a pure function of its outcomes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from paceline.client.results import RoundTimings, SpeculativeDecoding
from paceline.loadtest.outcomes import MEASURES, RequestOutcome

_PARTS = ("draft", "target", "queue", "wire", "coordinator", "total")


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of one measure over the finished requests, in seconds."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Latency | None:
        """The distribution with linearly interpolated percentiles; None without values."""
        found = sorted(values)
        if not found:
            return None
        cuts = statistics.quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
        return cls(statistics.fmean(found), cuts[49], cuts[89], cuts[94], cuts[98], found[-1])


@dataclass(frozen=True, slots=True)
class SpeculationSummary:
    """Speculation statistics of finished requests that were not resumed.

    Resumed requests are excluded because the coordinator may have counted only the part after the resumption.
    """

    num_rounds: int
    num_spec_steps: int
    """Rounds with a proposal."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_lookahead_hits: int
    num_prompt_lookups: int
    tokens_per_round: float | None
    draft_acceptance_rate: float | None
    """Accepted / drafted; None if nothing was drafted."""
    mean_acceptance_length: float
    """Mean number of committed tokens per round with a proposal."""
    accepted_to_position: tuple[float, ...]
    """Entry i: share of the rounds with a proposal that accepted draft token i and all before it."""
    seconds_per_round: RoundTimings | None
    """Means; None without rounds."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a test. Rates cover the whole test, `seconds` of the report."""

    seconds: float
    requests: int
    finished: int
    failed: Mapping[str, int]
    """Number of failed requests by error name."""
    resumed: int
    """Finished requests whose stream broke and was resumed."""
    num_resumes: int
    """Number of resumptions, including those of requests that failed later."""
    unsent: int
    """Requests that were due but still waited for a slot when the test ended."""
    most_at_a_time: int
    latest: float
    """Longest delay between due time and sending, in seconds."""
    prompt_tokens: int
    """This and all following fields cover finished requests only."""
    completion_tokens: int
    requests_per_second: float
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    goodput: float | None
    """Requests per second that met all goals; None without goals."""
    by_finish_reason: Mapping[str, int]
    latencies: Mapping[str, Latency | None]
    """By measure (`outcomes.MEASURES`); None if no request has it."""
    speculation: SpeculationSummary


def summary(
    outcomes: Sequence[RequestOutcome], seconds: float, goals: dict[str, float], unsent: int = 0
) -> Summary:
    """Summarise a test that took `seconds` > 0."""
    finished = [outcome for outcome in outcomes if outcome.answer]
    answers = [answer for outcome in outcomes if (answer := outcome.answer)]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    completion_tokens = sum(outcome.completion_tokens for outcome in finished)
    good = sum(outcome.meets(goals) for outcome in outcomes)
    return Summary(
        seconds=seconds,
        requests=len(outcomes),
        finished=len(finished),
        failed=Counter(type(outcome.error).__name__ for outcome in outcomes if outcome.error),
        resumed=sum(outcome.num_resumes > 0 for outcome in finished),
        num_resumes=sum(outcome.num_resumes for outcome in outcomes),
        unsent=unsent,
        most_at_a_time=most_at_a_time((outcome.sent, outcome.ended) for outcome in outcomes),
        latest=max((outcome.sent - outcome.due for outcome in outcomes), default=0.0),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        requests_per_second=len(finished) / seconds,
        prompt_tokens_per_second=prompt_tokens / seconds,
        completion_tokens_per_second=completion_tokens / seconds,
        goodput=good / seconds if goals else None,
        by_finish_reason=Counter(answer.finish_reason for answer in answers),
        latencies={measure: Latency.of(_values(finished, measure)) for measure in MEASURES},
        speculation=_speculation([outcome for outcome in finished if not outcome.num_resumes]),
    )


def _values(finished: Sequence[RequestOutcome], measure: str) -> Iterable[float]:
    if measure == "itl":
        return (gap for outcome in finished for gap in outcome.gaps)
    times: Iterable[float | None] = (getattr(outcome, measure) for outcome in finished)
    return (time for time in times if time is not None)


def most_at_a_time(spans: Iterable[tuple[float, float]]) -> int:
    """The largest number of overlapping spans [begin, end)."""
    changes = sorted(change for begin, end in spans for change in ((begin, 1), (end, -1)))
    now = most = 0
    for _, change in changes:  # an end sorts before a begin at the same time
        now += change
        most = max(most, now)
    return most


def _mean_acceptance_length(stats: Sequence[SpeculativeDecoding]) -> float:
    steps = sum(s.num_spec_steps for s in stats)
    return sum(s.mean_acceptance_length * s.num_spec_steps for s in stats) / steps if steps else 1.0


def _speculation(outcomes: Sequence[RequestOutcome]) -> SpeculationSummary:
    answers = [answer for outcome in outcomes if (answer := outcome.answer)]
    tokens = sum(outcome.completion_tokens for outcome in outcomes)
    stats = [answer.speculative_decoding for answer in answers]
    rounds, steps = sum(s.num_rounds for s in stats), sum(s.num_spec_steps for s in stats)
    drafted = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.num_accepted_draft_tokens for s in stats)
    histogram = [sum(each) for each in zip_longest(*(s.acceptance_histogram for s in stats), fillvalue=0)]
    reached = [sum(histogram[i:]) for i in range(1, len(histogram))]
    parts = [sum(getattr(answer.timings, part) for answer in answers) for part in _PARTS]
    return SpeculationSummary(
        num_rounds=rounds,
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_lookahead_hits=sum(s.num_lookahead_hits for s in stats),
        num_prompt_lookups=sum(s.num_prompt_lookups for s in stats),
        tokens_per_round=tokens / rounds if rounds else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=_mean_acceptance_length(stats),
        accepted_to_position=tuple(number / steps for number in reached) if steps else (),
        seconds_per_round=RoundTimings(*(part / rounds for part in parts)) if rounds else None,
    )
