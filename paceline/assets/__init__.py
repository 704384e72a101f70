"""The embedded model pair: `path("target")`, `path("draft")`.

Both folders load with `AutoModelForCausalLM` and `AutoTokenizer`. MODEL_CARD.md describes their training and
how well the draft predicts the target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.core.errors import InvalidArgumentError

_PREFIX: Final = "embedded:"
MAX_SCALE: Final = 64
"""Largest N of `embedded:target@N`: 1.3 billion parameters."""


def path(role: str) -> Path:
    """The folder of the embedded `target` or `draft` checkpoint. Raises InvalidArgumentError."""
    if role not in ("target", "draft"):
        raise InvalidArgumentError("role", f"must be target or draft, got {role!r}")
    return Path(__file__).parent / role


def prompts_of_all_kinds() -> Path:
    """The file with prompts of eight kinds of text, JSON lines as `paceline loadtest` reads them."""
    return Path(__file__).parent / "prompts" / "kinds.jsonl"


def resolve(model: str, field: str = "model") -> str:
    """The folder of `embedded:target`, `embedded:target@N` or `embedded:draft`; other names are unchanged.

    Raises InvalidArgumentError naming `field` for an unknown embedded model.
    """
    if not model.startswith(_PREFIX):
        return model
    role, _, scale = model.removeprefix(_PREFIX).partition("@")
    if role not in ("target", "draft"):
        known = f"{_PREFIX}target and {_PREFIX}draft"
        raise InvalidArgumentError(field, f"{model} is unknown; the embedded models are {known}")
    if "@" in model:
        if role != "target":
            raise InvalidArgumentError(field, f"{model}: only {_PREFIX}target can be scaled")
        if not (scale.isdecimal() and 1 <= int(scale) <= MAX_SCALE):
            raise InvalidArgumentError(field, f"{model}: the scale must be between 1 and {MAX_SCALE}")
    return str(path(role))


def scale_of(model: str) -> int:
    """N of `embedded:target@N`, which has N times the parameters and generates the same tokens; else 1."""
    _, at, scale = model.partition("@")
    return int(scale) if model.startswith(_PREFIX) and at else 1
