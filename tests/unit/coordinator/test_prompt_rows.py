"""What prompts add to rounds: what is found, and what is left of a time without them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.prompt_rows import EVIDENCE, LEAST, LEFT, Kind, PromptRows

ROWS = 16


def seen(row: float, rounds: int = 400, noise: float = 0.0, seed: int = 0) -> PromptRows:
    """After rounds of three kinds, which take 10, 20 and 40 without prompts."""
    rng, prompts = random.Random(seed), PromptRows()
    for _ in range(rounds):
        kind = rng.choice(((1, 0), (1, 4), (3, 4)))
        rows = rng.choice((0, ROWS, 2 * ROWS))
        seconds = {(1, 0): 10.0, (1, 4): 20.0, (3, 4): 40.0}[kind] + row * rows
        prompts.observe(kind, rows, seconds * (1 + noise * rng.uniform(-1, 1)))
    return prompts


@given(st.floats(0, 0.5))
def test_what_a_row_adds_is_found_whatever_is_decoded_beside_it(row: float) -> None:
    assert seen(row).row == pytest.approx(row, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_chance_moves_it_little(seed: int) -> None:
    assert seen(0.5, noise=0.2, seed=seed).row == pytest.approx(0.5, rel=0.25)


def test_what_drifts_is_not_taken_for_prompts() -> None:
    """A machine that slows down while more prompts come: rounds without them slow down as much."""
    prompts = PromptRows()
    for i in range(400):
        rows = ROWS * (i % 2)
        prompts.observe((1, 0), rows, 10.0 + i / 40 + 0.5 * rows)
    assert prompts.row == pytest.approx(0.5, rel=0.02)


def test_rounds_that_wait_for_as_many_rows_tell_nothing() -> None:
    prompts = PromptRows()
    for i in range(1000):
        prompts.observe((1, 0), ROWS + i % LEAST, 30.0)
    assert prompts.row is None
    assert prompts.without(ROWS, 30.0) is None
    assert prompts.without(0, 30.0) == 30.0


def test_it_is_believed_with_some_evidence() -> None:
    prompts, kind, needed = PromptRows(), (0, 0), 0
    while prompts.row is None:
        prompts.observe(kind, ROWS * (needed % 2), 10.0 + 8.0 * (needed % 2))
        needed += 1
    assert EVIDENCE / ROWS**2 < needed <= 1.1 * EVIDENCE / ROWS**2 + 2
    assert prompts.without(ROWS, 18.0) == pytest.approx(10.0)


def test_a_time_that_is_nearly_all_prompts_is_none() -> None:
    prompts = seen(0.5)
    assert prompts.without(ROWS, 8.0 / (1 - LEFT) + 0.1) is not None
    assert prompts.without(ROWS, 8.0 / (1 - LEFT) - 0.1) is None
    assert prompts.without(ROWS, 7.0) is None


def test_one_stall_is_no_price_of_prompts() -> None:
    prompts = seen(0.5)
    kind: Kind = (1, 0)
    prompts.observe(kind, 0, 10.0)
    prompts.observe(kind, ROWS, 10_000.0)
    row = prompts.row
    assert row is not None
    assert row < 0.6


def test_prompts_never_make_a_round_faster() -> None:
    prompts = PromptRows()
    for i in range(100):
        prompts.observe((1, 0), ROWS * (i % 2), 10.0 - 5.0 * (i % 2))
    assert prompts.row == 0.0
    assert prompts.without(ROWS, 5.0) == 5.0
