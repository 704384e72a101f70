"""Ceilings of the bytes that a step moves, over weights, keys and values, and logits once."""

from __future__ import annotations

from typing import Final

import pytest
from harness.tiers import mostly_full

from tests.cuda.traffic import TREE, TREES, cases, model_of

CEILING: Final = 1.15
MANY_ROWS: Final = {("8B", 5, 64, 1000): 1.28}
"""Steps above the ceiling: 320 rows between layers count as much as a fifth of the weights, and stay in a
GPU's cache."""
ROW: Final = 24_000_000
"""Bytes of a row of the 8B model between layers and in judging."""
FIRST: Final = [("8B", 1, 16, 4000), ("8B", 5, 16, 4000), ("8B", 1, 64, 1000)]
CASES: Final = FIRST + [case for case in cases() if case not in FIRST]


@pytest.mark.parametrize(("model", "rows", "sequences", "keys"), mostly_full(CASES, count=3))
def test_a_step_in_place_moves_little_more_than_the_least(
    model: str, rows: int, sequences: int, keys: int
) -> None:
    step = model_of(model, "varlen").step(sequences, keys, rows)
    assert 1 < step.ratio < MANY_ROWS.get((model, rows, sequences, keys), CEILING)


def test_gathered_attention_copies_keys_and_values() -> None:
    """They are read, written and read again, padded to a power of two."""
    step = model_of("8B", "gathered").step(16, 4000, 5)
    assert step.least == pytest.approx(23.5e9, rel=0.01)
    assert 1.7 < step.ratio < 1.9


@pytest.mark.parametrize(("sequences", "keys"), mostly_full(TREES, count=1))
def test_a_tree_copies_keys_and_values_once(sequences: int, keys: int) -> None:
    """As a chain does, not once for each node beside the trunk."""
    tree = model_of("8B", "gathered").step(sequences, keys, 1 + len(TREE), TREE)
    chain = model_of("8B", "gathered").step(sequences, keys, 5)
    rows = sequences * (len(TREE) - 4)
    assert tree.moved < chain.moved + rows * ROW
