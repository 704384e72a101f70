"""The bounds: each is a positive number, and each is enforced somewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline.core import limits

ROOT = Path(__file__).parents[3]
NAMES = [name for name in vars(limits) if name.isupper()]
USED = {
    node.attr
    for package in ("paceline", "coordinator", "draft_worker", "target_worker")
    for file in (ROOT / package).rglob("*.py")
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "limits"
}


@pytest.mark.parametrize("name", NAMES)
def test_every_bound_is_used(name: str) -> None:
    assert getattr(limits, name) > 0
    assert name in USED


def test_only_defined_bounds_are_used() -> None:
    assert set(NAMES) >= USED
    assert len(NAMES) > 30
