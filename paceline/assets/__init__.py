"""The embedded model pair: `path("target")`, `path("draft")`.

Both folders load with plain `AutoModelForCausalLM` and `AutoTokenizer`; MODEL_CARD.md in this folder
says what they were trained on and how well the draft predicts the target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.core.errors import InvalidArgumentError

_PREFIX: Final = "embedded:"


def path(role: str) -> Path:
    """The folder of the embedded `target` or `draft` checkpoint. Raises InvalidArgumentError."""
    if role not in ("target", "draft"):
        raise InvalidArgumentError("role", f"must be target or draft, got {role!r}")
    return Path(__file__).parent / role


def resolve(model: str, field: str = "model") -> str:
    """`embedded:target` and `embedded:draft` as folders; every other name as it is.

    Raises InvalidArgumentError naming `field` for an embedded model that is not there.
    """
    if not model.startswith(_PREFIX):
        return model
    role = model.removeprefix(_PREFIX)
    if role not in ("target", "draft"):
        known = f"{_PREFIX}target and {_PREFIX}draft"
        raise InvalidArgumentError(field, f"{model} is unknown: {known} come with Paceline")
    return str(path(role))
