"""What came of one request: when its tokens came, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from paceline.client.results import GenerationResult, RoundTimings, SpeculativeDecoding, to_plain
from paceline.core.errors import PacelineError
from paceline.core.types import AcceptanceMode

MEASURES = ("ttft", "tpot", "itl", "e2e")
"""Time to the first token, mean time of a token after it, gaps between chunks, the whole request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteAnswer:
    """What is kept of a whole answer: a test of hours has no room for the texts."""

    acceptance: AcceptanceMode
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    speculative_decoding: SpeculativeDecoding
    timings: RoundTimings
    token_ids: tuple[int, ...]
    """Empty where they are not to be compared with anything."""

    @classmethod
    def of(cls, result: GenerationResult, *, with_tokens: bool) -> Self:
        """Of a finished generation."""
        return cls(
            acceptance=result.acceptance,
            finish_reason=result.finish_reason,
            prompt_tokens=result.usage.prompt_tokens,
            speculative_decoding=result.speculative_decoding,
            timings=result.timings,
            token_ids=result.token_ids if with_tokens else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One request. Times are in seconds after the start of the test."""

    number: int
    due: float
    """When it should have been sent. Its times begin here, so what waits to be sent is late as well."""
    sent: float
    ended: float
    times: Sequence[float]
    """When tokens came."""
    counts: Sequence[int]
    """How many each time: those of a round come together."""
    num_resumes: int = 0
    """How often its stream broke and was asked for again."""
    answer: CompleteAnswer | None = None
    """None if it failed."""
    error: PacelineError | None = None
    """Why it failed."""

    @property
    def completion_tokens(self) -> int:
        """Those that came, of a failed one too."""
        return sum(self.counts)

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None if none came."""
        return self.times[0] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first chunk; None if nothing came after it.

        The first round may bring several tokens, and they take no time after the first one of them. So this
        counts from chunk to chunk, as one who reads along does.
        """
        after = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / after if after else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: between chunks, since the tokens of one come together."""
        return tuple(later - earlier for earlier, later in pairwise(self.times))

    @property
    def failure(self) -> str | None:
        """Why it failed, in words."""
        return f"{type(self.error).__name__}: {self.error.message}" if self.error else None

    @property
    def e2e(self) -> float:
        """From when it was due to its end."""
        return self.ended - self.due

    def meets(self, goals: dict[str, float]) -> bool:
        """True where it finished within all of them. What has no time, as one token has none after the first,
        is not late."""
        times = (getattr(self, name) for name in goals)
        within = (t is None or t <= goal for t, goal in zip(times, goals.values(), strict=True))
        return self.answer is not None and all(within)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without text and tokens."""
        answer = self.answer
        return {
            "number": self.number,
            "due": self.due,
            "sent": self.sent,
            "ended": self.ended,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "e2e": self.e2e,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens": answer.prompt_tokens if answer else None,
            "finish_reason": answer.finish_reason if answer else None,
            "speculative_decoding": to_plain(answer.speculative_decoding) if answer else None,
            "num_resumes": self.num_resumes,
            "error": type(self.error).__name__ if self.error else None,
            "message": self.error.message if self.error else None,
        }
