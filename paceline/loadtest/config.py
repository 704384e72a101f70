"""Settings of a load test: frozen, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from paceline.client.requests import MAX_TIMEOUT
from paceline.core.types import AcceptanceMode, SamplingParams
from paceline.core.validation import require

DEFAULT_REQUESTS: Final = 100
DEFAULT_CONCURRENCY: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """One load test. Times are in seconds.

    With a `rate`, requests start when they are due, whether or not others have ended (an open loop, like
    independent users). Without one, a request starts when another ends (a closed loop of `concurrency`
    clients).
    """

    requests: int | None = None
    """Number of requests; 100 if neither this nor --duration is given."""
    duration: float | None = None
    """Seconds after which no request is started; running requests are awaited."""
    rate: float | None = None
    """Requests per second, started when due; without it, a request starts when another one ends."""
    burstiness: float = 1.0
    """Distribution of arrivals at --rate: 1 is random (Poisson), less is bursty, much more is even."""
    concurrency: int | None = None
    """Most concurrent requests; 8 without --rate. With --rate, due requests wait, and their times include the
    wait."""
    prompt_tokens: int | None = None
    """Length of random prompts, all different; their acceptance rates are meaningless."""
    length_spread: float = 0.0
    """Largest share by which lengths of random prompts and answers vary up and down."""
    warm_up: int = 1
    """Sequential requests before the test that do not count; an error ends the test."""
    cold_prompts: bool = False
    """Share no prompt through the prefix cache; random prompts never are shared."""
    verify: int = 0
    """Number of answers to request again afterwards, one at a time without draft tokens, and compare."""
    timeout: float | None = None
    """Seconds for each request."""
    goal_ttft: float | None = None
    """Goal for the time to the first token, in seconds; goodput counts requests that meet all goals."""
    goal_tpot: float | None = None
    """Goal for the mean time per token after the first, in seconds."""
    goal_e2e: float | None = None
    """Goal for the whole request, in seconds."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        for name in ("requests", "concurrency", "prompt_tokens", "warm_up"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be at least 1, got {value}")
        require(self.verify >= 0, "verify", f"must not be negative, got {self.verify}")
        spread = self.length_spread
        require(0 <= spread < 1, "length_spread", f"must be in [0, 1), got {spread}")
        seconds = ("duration", "timeout", "goal_ttft", "goal_tpot", "goal_e2e")
        for name in ("rate", "burstiness", *seconds):
            value = getattr(self, name)
            # The bound is gRPC's for deadlines. NaN fails the comparison.
            require(value is None or 0 < value <= MAX_TIMEOUT, name, f"must be in (0, 1e9], got {value}")
        even = self.rate is not None or self.burstiness == 1
        require(even, "burstiness", "requires --rate")

    @property
    def most_requests(self) -> int | None:
        """Number of requests; None if only the duration ends the test."""
        if self.requests is None and self.duration is None:
            return DEFAULT_REQUESTS
        return self.requests

    @property
    def places(self) -> int | None:
        """Most concurrent requests; None is no bound."""
        if self.concurrency is None and self.rate is None:
            return DEFAULT_CONCURRENCY
        return self.concurrency

    @property
    def are_cold(self) -> bool:
        """True if no prompt may be found in the prefix cache. Random prompts measure prefill, so they must
        not be found when they are repeated either."""
        return self.cold_prompts or self.prompt_tokens is not None

    @property
    def goals(self) -> dict[str, float]:
        """The given goals by name of the measure."""
        names = [f.name for f in fields(self) if f.name.startswith("goal_")]
        return {name.removeprefix("goal_"): g for name in names if (g := getattr(self, name)) is not None}


def check_request(config: LoadConfig, sampling: SamplingParams, mode: AcceptanceMode | None) -> None:
    """Refuse unsupported parameters. `mode` is None if not yet known. Raises InvalidArgumentError."""
    require(sampling.n == 1, "n", f"must be 1 in a load test, got {sampling.n}")
    bounded = sampling.max_tokens is not None or not config.length_spread
    require(bounded, "length_spread", "requires max_tokens")
    # A seed gives the same tokens without a draft only if every token is the target's own choice.
    equal = mode is None or mode.facts.shares_noise or sampling.greedy
    require(
        equal or not config.verify,
        "verify",
        f"in {mode.value if mode else ''} mode above temperature 0, the tokens of a seed depend on the draft "
        "(their distribution does not)",
    )
