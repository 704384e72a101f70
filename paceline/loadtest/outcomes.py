"""The outcome of one request: arrival times of its tokens, and its answer or error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from paceline.client.results import GenerationResult, RoundTimings, SpeculativeDecoding, to_plain
from paceline.core.errors import PacelineError
from paceline.core.types import AcceptanceMode

MEASURES = ("ttft", "tpot", "itl", "e2e")
"""Time to the first token, mean time per token after it, gaps between chunks, the whole request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteAnswer:
    """The kept part of an answer, without the text, which would fill the memory in a long test."""

    acceptance: AcceptanceMode
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    speculative_decoding: SpeculativeDecoding
    timings: RoundTimings
    token_ids: tuple[int, ...]
    """Empty if answers are not verified."""

    @classmethod
    def of(cls, result: GenerationResult, *, with_tokens: bool) -> Self:
        """From a finished generation."""
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
    """Time at which it should have been sent. Latencies count from here, so waiting to be sent counts."""
    sent: float
    ended: float
    times: Sequence[float]
    """Arrival times of chunks."""
    counts: Sequence[int]
    """Number of tokens in each chunk; the tokens of a round arrive together."""
    num_resumes: int = 0
    """Number of times its stream was resumed."""
    answer: CompleteAnswer | None = None
    """None if the request failed."""
    error: PacelineError | None = None
    """The error if the request failed."""

    @property
    def completion_tokens(self) -> int:
        """Number of received tokens, also of a failed request."""
        return sum(self.counts)

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None without tokens."""
        return self.times[0] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first chunk; None without further chunks.

        The first chunk may have several tokens, which arrive together, so all of them are left out.
        """
        after = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / after if after else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between chunks, because tokens of a chunk arrive together."""
        return tuple(later - earlier for earlier, later in pairwise(self.times))

    @property
    def failure(self) -> str | None:
        """The error's name and message."""
        return f"{type(self.error).__name__}: {self.error.message}" if self.error else None

    @property
    def e2e(self) -> float:
        """Time from the due time to the end."""
        return self.ended - self.due

    def meets(self, goals: dict[str, float]) -> bool:
        """True if the request finished within all goals. A measure without a value, such as `tpot` of a
        single token, meets its goal."""
        times = (getattr(self, name) for name in goals)
        within = (t is None or t <= goal for t, goal in zip(times, goals.values(), strict=True))
        return self.answer is not None and all(within)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON, without text and tokens."""
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
