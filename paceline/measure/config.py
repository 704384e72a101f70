"""Settings of a measurement: frozen, validated on construction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.core import limits
from paceline.core.config import check_dtype
from paceline.core.types import SamplingParams
from paceline.core.validation import device, require


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Settings of one run."""

    target_model: str = "embedded:target"
    draft_models: tuple[str, ...] = ("embedded:draft",)
    """Models to measure as drafters."""
    drafters: tuple[str, ...] = ()
    """Names of drafters without a model: the draft worker's, and context sources."""
    corpus: str = ""
    """Text file that unigram and bigram count; empty takes the embedded text."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    """Tokens that the target writes after each prompt, unless the prompt has its own number."""
    max_k: int = 16
    """Largest K of the predictions."""
    seed: int = 0
    """Text i has seed + i."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    """CPU threads of each model."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        _check_list("temperature", self.temperature)
        require(bool(self.target_model), "target_model", "is required")
        require(all(self.draft_models), "draft_model", "is empty")
        for name, values in (("draft_model", self.draft_models), ("drafter", self.drafters)):
            require(len(set(values)) == len(values), name, "has a repeated value")
        both = set(self.draft_models) & set(self.drafters)
        require(not both, "drafter", f"{', '.join(both)} is also the name of a draft model")
        require(
            bool(self.draft_models or self.drafters),
            "draft_model",
            "with none, at least one --drafter is required",
        )
        require(self.max_tokens >= 2, "max_tokens", f"must be at least 2, got {self.max_tokens}")
        require(
            1 <= self.max_k <= limits.MAX_SPECULATIVE_TOKENS,
            "max_k",
            f"must be in [1, {limits.MAX_SPECULATIVE_TOKENS}], got {self.max_k}",
        )
        require(self.threads >= 1, "threads", f"must be at least 1, got {self.threads}")
        device("device", self.device)
        check_dtype("dtype", self.dtype)
        for temperature in self.temperature:
            self.sampling(temperature, 0)

    def sampling(self, temperature: float, text: int) -> SamplingParams:
        """How the target samples a text. Raises InvalidArgumentError naming the field."""
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=self.seed + text,
        )


def _check_list(name: str, values: Collection[object]) -> None:
    require(bool(values), name, "must have at least one value")
    require(len(set(values)) == len(values), name, "has a repeated value")
