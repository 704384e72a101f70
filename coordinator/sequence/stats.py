"""Speculation counts of one request, and the times of its rounds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from coordinator.sequence.round_record import PROMPT_LOOKUP, RoundRecord
from paceline.core.types import Timings


@dataclass(slots=True)
class SourceStats:
    """Counts over the committed rounds with a proposal from one source."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    def record(self, told: RoundRecord) -> None:
        """Count one round."""
        self.num_rounds += 1
        self.num_draft_tokens += told.num_draft
        self.num_accepted_draft_tokens += told.num_accepted

    def add(self, other: SourceStats) -> None:
        """Add the counts of another sequence."""
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens


def by_source() -> defaultdict[str, SourceStats]:
    """Empty counts by source."""
    return defaultdict(SourceStats)


@dataclass(slots=True)
class SpeculationStats:
    """Counts over the committed rounds of one request.

    Draft tokens after the end of a sequence were verified, but count as neither accepted nor rejected.
    """

    num_rounds: int = 0
    num_spec_steps: int = 0
    num_step_tokens: int = 0
    """Tokens committed in rounds with a proposal."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_lookahead_hits: int = 0
    """Rounds whose proposal was there when the verdict came."""
    by_source: defaultdict[str, SourceStats] = field(default_factory=by_source)
    """Counts by the name of the proposal's source."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose cache entries the target already had when the sequence began."""
    histogram: list[int] = field(default_factory=list)
    """Entry i: rounds with a proposal in which exactly i draft tokens were accepted."""
    reached: list[int] = field(default_factory=list)
    """Entry i: proposals with a token at position i, a tree's depth, that was accepted or replaced by a
    correction."""
    accepted_at: list[int] = field(default_factory=list)
    """Entry i: proposals of which a token at position i was accepted."""
    accepted_per_rank: list[int] = field(default_factory=list)
    """Entry i: accepted draft tokens that were child i of their node."""

    def record(self, told: RoundRecord) -> None:
        """Count one committed round."""
        num_draft, num_accepted = told.num_draft, told.num_accepted
        self.num_rounds += 1
        if num_draft == 0:
            return
        self.num_spec_steps += 1
        self.num_step_tokens += told.num_tokens
        self.num_draft_tokens += num_draft
        self.num_lookahead_hits += told.hit
        self.by_source[told.proposed_by].record(told)
        self.num_accepted_draft_tokens += num_accepted
        for counts, size in (
            (self.histogram, told.depth + 1),
            (self.reached, told.depth),
            (self.accepted_at, told.depth),
        ):
            counts.extend([0] * (size - len(counts)))
        widest = max(told.accepted_ranks, default=-1)
        self.accepted_per_rank.extend([0] * (widest + 1 - len(self.accepted_per_rank)))
        for rank in told.accepted_ranks:
            self.accepted_per_rank[rank] += 1
        self.histogram[num_accepted] += 1
        for i in range(told.num_judged):
            self.reached[i] += 1
        for i in range(num_accepted):
            self.accepted_at[i] += 1

    @property
    def proposing(self) -> dict[str, SourceStats]:
        """Counts of the sources that proposed at least once."""
        return {source: counts for source, counts in self.by_source.items() if counts.num_rounds}

    @property
    def num_prompt_lookups(self) -> int:
        """Rounds whose proposal was copied from the sequence's own text."""
        return self.by_source[PROMPT_LOOKUP].num_rounds

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens divided by draft tokens; 0 before the first draft token."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per round with a proposal; 1 without such a round."""
        return self.num_step_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """For each position, the share of proposals reaching it whose token there was accepted."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached, strict=True)]


@dataclass(slots=True)
class RoundTimes:
    """Seconds, summed over the rounds of one request."""

    draft: float = 0.0
    target: float = 0.0
    queue: float = 0.0
    wire: float = 0.0
    coordinator: float = 0.0

    def draft_answered(self, elapsed: float, timings: Timings) -> None:
        """Split the time between a DraftRound and its answer."""
        self.draft += timings.compute
        self._rest(elapsed, timings)

    def target_answered(self, elapsed: float, timings: Timings) -> None:
        """Split the time between a VerifyRound and its answer.

        If the target began the round by itself, it ran before the last verdict came, so only the time waited
        counts.
        """
        self.target += min(timings.compute, elapsed)
        self._rest(elapsed, timings)

    def _rest(self, elapsed: float, timings: Timings) -> None:
        self.queue += timings.queue
        self.wire += max(0.0, elapsed - timings.compute - timings.queue)

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.draft + self.target + self.queue + self.wire + self.coordinator
