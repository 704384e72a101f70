"""What load to send: frozen, validated when built."""

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

    With a `rate` requests begin when they are due, whether or not others have ended (an open loop, as users
    are). Without one the next begins when one has ended (a closed loop, `concurrency` at a time).
    """

    requests: int | None = None
    """How many to send; 100 if neither this nor --duration is given."""
    duration: float | None = None
    """Seconds after which none is begun any more; those that run are waited for."""
    rate: float | None = None
    """Requests a second, begun when they are due; if not given, one begins when another one ends."""
    burstiness: float = 1.0
    """Of --rate: 1 are arrivals at random (Poisson), less comes in bursts, much more comes evenly."""
    concurrency: int | None = None
    """The most at a time; 8 without --rate. With it what is due waits for a place, and its times say so."""
    prompt_tokens: int | None = None
    """Prompts of so many random tokens, each another one; they say nothing of acceptance."""
    length_spread: float = 0.0
    """Share by which these and the answers are longer or shorter, at most."""
    warm_up: int = 1
    """Requests before it, one by one, that do not count; an error of theirs ends the test."""
    cold_prompts: bool = False
    """No prompt is shared through the prefix cache; random ones never are."""
    verify: int = 0
    """Afterwards so many of the answers are asked for again alone and without draft tokens, and compared."""
    timeout: float | None = None
    """Seconds for each request."""
    goal_ttft: float | None = None
    """Goal of the time to the first token, in seconds; goodput counts the requests that meet all goals."""
    goal_tpot: float | None = None
    """The same for the mean time of a token after the first."""
    goal_e2e: float | None = None
    """The same for the whole request."""

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
            # Also what gRPC takes for a deadline; and NaN is in no range.
            require(value is None or 0 < value <= MAX_TIMEOUT, name, f"must be in (0, 1e9], got {value}")
        even = self.rate is not None or self.burstiness == 1
        require(even, "burstiness", "is of arrivals at a rate; give --rate as well")

    @property
    def most_requests(self) -> int | None:
        """None where the duration alone ends the test."""
        if self.requests is None and self.duration is None:
            return DEFAULT_REQUESTS
        return self.requests

    @property
    def places(self) -> int | None:
        """The most at a time; None is no bound."""
        if self.concurrency is None and self.rate is None:
            return DEFAULT_CONCURRENCY
        return self.concurrency

    @property
    def are_cold(self) -> bool:
        """No prompt is found in the prefix cache: random ones say what prefill costs, also when they are sent
        once more."""
        return self.cold_prompts or self.prompt_tokens is not None

    @property
    def goals(self) -> dict[str, float]:
        """By the measure's name, those that were set."""
        names = [f.name for f in fields(self) if f.name.startswith("goal_")]
        return {name.removeprefix("goal_"): g for name in names if (g := getattr(self, name)) is not None}


def check_request(config: LoadConfig, sampling: SamplingParams, mode: AcceptanceMode | None) -> None:
    """Refuse what a load test cannot do; `mode` None is not known yet. Raises InvalidArgumentError."""
    require(sampling.n == 1, "n", f"a load test asks for one completion a request, got {sampling.n}")
    bounded = sampling.max_tokens is not None or not config.length_spread
    require(bounded, "length_spread", "needs max_tokens")
    # Only where the target's own choice decides are the tokens of a seed the same without a draft.
    equal = mode is None or mode.facts.shares_noise or sampling.greedy
    require(
        equal or not config.verify,
        "verify",
        f"in {mode.value if mode else ''} mode above temperature 0 the tokens of a seed depend on the draft, "
        "only their distribution does not",
    )
