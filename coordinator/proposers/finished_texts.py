"""Finished answers by tenant, from which later requests of the same tenant draft. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core import limits
from paceline.predictors.occurrences import Occurrences

BETWEEN = -1
"""Stands between two answers, so that no path leads from one into the next."""
TENANT_SHARE = 4
"""One tenant has at most this fraction, 1 / 4, of all tokens, so it cannot drive all others out."""
SEGMENTS = 2
"""A tenant's texts are in so many parts. The oldest part is dropped as a whole, which takes no time."""
OVERHEAD_TOKENS = 64
"""Counted for each answer in addition to its tokens, so that many short ones are bounded too."""


@dataclass(slots=True)
class Segment:
    """Answers one after the other, with the index of their token pairs."""

    tokens: list[int] = field(default_factory=list)
    occurrences: Occurrences = field(default_factory=Occurrences)
    num_answers: int = 0

    @property
    def size(self) -> int:
        """Tokens that count towards the bounds."""
        return len(self.tokens) + self.num_answers * OVERHEAD_TOKENS


@dataclass(slots=True)
class TenantTexts:
    """The answers of one tenant."""

    most_tokens: int
    most_answers: int
    segments: deque[Segment] = field(default_factory=lambda: deque([Segment()]))
    """Newest first."""

    @property
    def size(self) -> int:
        """Tokens that count towards the bounds."""
        return OVERHEAD_TOKENS + sum(segment.size for segment in self.segments)

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer; the oldest ones give way."""
        most = self.most_tokens // SEGMENTS
        answer = answer[-most:]
        newest = self.segments[0]
        full = newest.size + len(answer) > most or newest.num_answers >= self.most_answers / SEGMENTS
        if full and newest.num_answers:
            newest = Segment()
            self.segments.appendleft(newest)
            while len(self.segments) > SEGMENTS:
                self.segments.pop()
        newest.tokens += [BETWEEN, *answer]
        newest.num_answers += 1
        newest.occurrences.take_in(newest.tokens, len(newest.tokens))


@dataclass(slots=True)
class FinishedTexts:
    """The answers of all tenants, within one bound. The tenant that was least recently used gives way."""

    most_answers: int
    """Of one tenant; 0 keeps none."""
    most_tokens: int = limits.MAX_SHARED_DRAFT_TOKENS
    size: int = 0
    """Tokens that count towards the bound."""
    _tenants: OrderedDict[str, TenantTexts] = field(default_factory=OrderedDict)

    def texts(self, salt: str) -> list[tuple[Sequence[int], Occurrences]]:
        """The texts that requests with this salt share, newest first, with the indexes of their token pairs.

        The salt tells tenants apart, as it does for cached prefixes.
        """
        texts = self._tenants.get(salt)
        if texts is None:
            return []
        self._tenants.move_to_end(salt)
        return [(segment.tokens, segment.occurrences) for segment in texts.segments]

    def add(self, salt: str, answer: Sequence[int]) -> None:
        """Keep an answer for later requests with the same salt."""
        if not (self.most_answers and answer):
            return
        texts = self._tenants.get(salt)
        if texts is None:
            texts = self._tenants[salt] = TenantTexts(self.most_tokens // TENANT_SHARE, self.most_answers)
        else:
            self.size -= texts.size
        texts.add(answer)
        self.size += texts.size
        self._tenants.move_to_end(salt)
        while self.size > self.most_tokens:
            self.size -= self._tenants.popitem(last=False)[1].size
