"""Kept noise is the noise, whatever was asked for before and made ahead."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.decoding import noise_memo
from paceline.decoding.noise import gumbel
from paceline.decoding.noise_memo import EXPECTED, NoiseMemo

VOCAB = 21


def params(mode: AcceptanceMode = AcceptanceMode.COUPLED, temperature: float = 1.0) -> SequenceParams:
    return SequenceParams(SamplingParams(temperature=temperature, seed=7), mode, 1)


@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_the_numbers_are_those_of_the_noise(rows: int) -> None:
    """With room for few rows, some and all; repeated positions and several seeds in one question."""
    rng = random.Random(rows)
    memo = NoiseMemo(VOCAB, 8 * VOCAB * rows)
    for _ in range(60):
        count = rng.randint(1, 9)
        seeds = [rng.choice((7, 2**64 - 1)) for _ in range(count)]
        positions = [rng.randint(1, 12) for _ in range(count)]
        if rng.random() < 0.5:
            memo.expect(params(), rng.randint(1, 12), 3)
            memo.prepare()
        assert torch.equal(memo.rows(seeds, positions), gumbel(seeds, positions, VOCAB))
        assert len(memo) <= rows


def test_what_was_prepared_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memo = NoiseMemo(VOCAB)
    memo.rows([7, 7], [5, 6])
    memo.expect(params(), 6, 3)
    assert memo.prepare()
    assert memo.prepare()
    assert not memo.prepare(), "position 6 was there"
    want = gumbel([7] * 4, range(5, 9), VOCAB)

    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(noise_memo, "gumbel", refuse)
    assert torch.equal(memo.rows([7] * 4, range(5, 9)), want)


def test_the_rows_used_longest_ago_make_room() -> None:
    memo = NoiseMemo(VOCAB, 8 * VOCAB * 4)
    for position in (1, 2, 3, 4):
        memo.rows([7], [position])
    memo.rows([7], [1])
    memo.rows([7], [5])
    assert [position for _, position in memo._rows] == [3, 4, 1, 5]


@pytest.mark.parametrize(
    "of", [params(temperature=0.0), params(AcceptanceMode.REJECTION), params(AcceptanceMode.BLOCK)]
)
def test_requests_without_this_noise_have_none_prepared(of: SequenceParams) -> None:
    memo = NoiseMemo(VOCAB)
    memo.expect(of, 1, 5)
    assert not memo.prepare()


def test_no_more_is_expected_than_the_bound() -> None:
    memo = NoiseMemo(VOCAB)
    memo.expect(params(), 1, 2 * EXPECTED)
    made = 0
    while memo.prepare():
        made += 1
    assert made == EXPECTED
