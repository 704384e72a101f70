"""What to measure: frozen, validated when built."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.bench.prompts import PROMPTS
from paceline.bench.workload import LENGTH_SPREAD
from paceline.core import limits
from paceline.core.config import DTYPES
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams
from paceline.core.validation import device
from paceline.supervisor import StackConfig


def _check(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(name, message)


def _check_list(name: str, values: Collection[object]) -> None:
    _check(bool(values), name, "needs at least one value")
    _check(len(set(values)) == len(values), name, "has a value twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One run."""

    target_model: str = "embedded:target@7"
    """The heavy one: passes of the small target are so short that messages decide."""
    draft_model: str = "embedded:draft"
    device: str = "auto"
    """Of all models, ours and the peers'."""
    draft_device: str | None = None
    """Of our draft; None is that of the others."""
    dtype: str = "auto"
    threads: int = 1
    """CPU threads of each model, ours and the peers'."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    acceptance: AcceptanceMode = AcceptanceMode.COUPLED
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    k: tuple[int, ...] = (4, 8, 2)
    """Fixed K beside 0; transformers' assisted generation has the first one."""
    max_tokens: int = 128
    """Of each request; on average where there are several at a time."""
    repeats: int = 2
    """Measured runs of every arm over every workload, but for peers, which take part in the first; what warms
    up is not among them."""
    prompts: int = len(PROMPTS)
    """How many of the prompts; one request at a time runs each of them singly."""
    peers: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        for name in ("temperature", "concurrency", "k"):
            _check_list(name, getattr(self, name))
        device("device", self.device)
        if self.draft_device is not None:
            device("draft_device", self.draft_device)
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype}")
        _check(self.threads >= 1, "threads", f"must be at least 1, got {self.threads}")
        _check(self.max_tokens >= 2, "max_tokens", "must be at least 2: rates count from the first token on")
        for value in self.temperature:
            SamplingParams(temperature=value, max_tokens=self.max_tokens)
        for k in self.k:
            _check(
                1 <= k <= limits.MAX_SPECULATIVE_TOKENS,
                "k",
                f"must be in [1, {limits.MAX_SPECULATIVE_TOKENS}], got {k}; 0 is always measured",
            )
        for n in self.concurrency:
            _check(
                1 <= n <= limits.MAX_RUNNING_SEQUENCES,
                "concurrency",
                f"must be in [1, {limits.MAX_RUNNING_SEQUENCES}], got {n}",
            )
        _check(self.repeats >= 1, "repeats", f"must be at least 1, got {self.repeats}")
        most = len(PROMPTS)
        _check(1 <= self.prompts <= most, "prompts", f"must be in [1, {most}], got {self.prompts}")

    @property
    def measures_load(self) -> bool:
        """Several requests at a time, in a part of the run or all of it."""
        return max(self.concurrency) > 1

    @property
    def longest_answer(self) -> int:
        """Tokens, at most: answers differ in length where there are several at a time."""
        return self.max_tokens + (int(self.max_tokens * LENGTH_SPREAD) if self.measures_load else 0)

    @property
    def measures_peers(self) -> bool:
        """They decode one request at a time."""
        return self.peers and 1 in self.concurrency

    @property
    def drafts_ahead(self) -> bool:
        """True where `paceline serve` drafts ahead by itself: K is chosen there as its users get it."""
        serving = StackConfig(target_device=self.device, draft_device=self.device_of_draft)
        return serving.draft_config.lookahead_branches > 0

    @property
    def device_of_draft(self) -> str:
        """What `draft_device` says, or what it is if not given."""
        return self.device if self.draft_device is None else self.draft_device


FULL = BenchConfig()
QUICK = replace(FULL, concurrency=(1,), k=(4,), max_tokens=40, prompts=2)
"""The ratios at one request, in a few minutes."""
