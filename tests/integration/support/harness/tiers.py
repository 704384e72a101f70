"""The part of a long matrix that `make test` runs; the markers are declared in pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_full(values: Iterable[Any], *, count: int) -> list[Any]:
    """Parameters of a test: the first `count` in every tier, the others in the full one alone."""
    assert count > 0, "a test that only the full tier has is marked itself"
    return [
        value if number < count else pytest.param(*_parts(value), marks=pytest.mark.full)
        for number, value in enumerate(values)
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    """A tuple has one value for each of several names."""
    return value if isinstance(value, tuple) else (value,)
