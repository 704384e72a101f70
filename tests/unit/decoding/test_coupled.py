"""Coupled choices are the argmax of score + noise, though little noise is made."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.decoding import coupled, cuda, gumbel_argmax
from paceline.decoding.coupled import Noise, add_coupled_noise, coupled_choice, ranked
from paceline.decoding.cuda import kernels
from paceline.decoding.noise import CoupledNoise, Purpose, gumbel, uniforms
from paceline.decoding.theory import coupled_acceptance


def noise_of(n: CoupledNoise, vocabulary: int) -> list[float]:
    """The whole noise of one position, by the C library's logarithm, as compiled code has it."""
    u = uniforms([n.seed], [n.first], Purpose.COUPLED, vocabulary)[0].tolist()
    return [-math.log(-math.log(value)) for value in u]


def expected(scores: torch.Tensor, noise: Noise, count: int) -> list[list[tuple[int, float]]]:
    """All sums, sorted."""
    told = []
    for row, n in zip(scores.double().tolist(), noise, strict=True):
        added = noise_of(n, len(row)) if n is not None else [0.0] * len(row)
        sums = [(v, score + g) for v, (score, g) in enumerate(zip(row, added, strict=True))]
        possible = [entry for entry in sums if entry[1] > -math.inf]
        told.append(sorted(possible, key=lambda entry: (-entry[1], entry[0]))[:count])
    return told


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5, 97, 2048])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 6.0, 40.0, 1e4])
def test_the_chosen_token_has_the_best_sum(vocabulary: int, scale: float) -> None:
    """Rows with noise and without in one batch, some tokens filtered out, flat scores and very steep ones."""
    rng = random.Random(f"{vocabulary} {scale}")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for count in (1, 2, 9):
        scores = torch.randn(12, vocabulary, generator=generator) * scale
        if vocabulary > 1:
            scores[torch.rand(scores.shape, generator=generator) < 0.2] = -torch.inf
            scores[:, rng.randrange(vocabulary)] = 0.0
        noise = [
            CoupledNoise(rng.choice((rng.randrange(2**64), 2**64 - 1)), rng.randrange(2**40))
            if rng.random() < 0.7
            else None
            for _ in scores
        ]
        wanted = expected(scores, noise, count)
        assert ranked(scores, noise, count) == wanted
        assert coupled_choice(scores, noise).tolist() == [row[0][0] for row in wanted]
        silent: Noise = [None] * len(scores)
        assert coupled_choice(scores, silent).tolist() == [row[0][0] for row in expected(scores, silent, 1)]


def test_a_row_is_chosen_alike_in_any_batch() -> None:
    scores = torch.randn(40, 301, generator=torch.Generator().manual_seed(1)) * 3
    noise = [CoupledNoise(5, position) if position % 3 else None for position in range(40)]
    together = coupled_choice(scores, noise).tolist()
    assert together == [int(coupled_choice(scores[i : i + 1], noise[i : i + 1])) for i in range(40)]
    padded = torch.cat([scores, scores], dim=1)[:, :301]
    assert coupled_choice(padded, noise).tolist() == together


def test_tensors_give_the_same_sums() -> None:
    scores = torch.randn(30, 211, generator=torch.Generator().manual_seed(2)) * 3
    noise = [CoupledNoise(9, position) if position % 4 else None for position in range(30)]
    sums = add_coupled_noise(scores, noise)
    best = sums.topk(4, dim=-1)
    assert coupled_choice(scores, noise).tolist() == sums.argmax(-1).tolist()
    for row, tokens, values in zip(ranked(scores, noise, 4), best.indices, best.values, strict=True):
        assert [token for token, _ in row] == tokens.tolist()
        assert [value for _, value in row] == pytest.approx(values.tolist(), rel=1e-12)
    assert add_coupled_noise(scores, [None] * 30) is scores


@pytest.mark.parametrize("noisy", [1, 2, 4], ids=["all rows", "every second", "some"])
def test_noise_is_made_for_few_rows_at_once(noisy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of all rows together; one row is the least."""
    scores = torch.randn(30, 211, generator=torch.Generator().manual_seed(5)) * 3
    scores[:, 7] = -torch.inf
    noise = [CoupledNoise(9, position) if position % noisy == 0 else None for position in range(30)]
    whole = scores.double()
    whole[::noisy] += gumbel([9] * len(range(0, 30, noisy)), range(0, 30, noisy), 211)
    made: list[int] = []

    def counted(seeds: Sequence[int], *rest: Any) -> torch.Tensor:
        made.append(len(seeds))
        return gumbel(seeds, *rest)

    monkeypatch.setattr(coupled, "gumbel", counted)
    for most, rows in ((4 * 211 + 5, 4), (210, 1), (2**24, 30)):
        monkeypatch.setattr(coupled, "MAX_NOISE", most)
        made.clear()
        assert torch.equal(add_coupled_noise(scores, noise), whole)
        assert max(made) <= rows
        assert sum(made) == len(range(0, 30, noisy))


def test_a_device_ranks_tokens_equally_lowest_id_first() -> None:
    """What runs where the logits are not on a CPU, with more equals than are wanted."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 3, (60, 9), generator=generator).float()
    scores[:, 2] = -torch.inf
    noise = [CoupledNoise(9, position) if position % 4 == 0 else None for position in range(60)]
    for count in (1, 3, 9):
        tokens, values = coupled.ranked_in_tensors(scores, noise, count)
        wanted = ranked(scores, noise, count)
        assert tokens[:, 0].tolist() == [row[0][0] for row in wanted]
        for row, found, worth in zip(wanted, tokens.tolist(), values.tolist(), strict=True):
            assert len(set(found)) == count
            assert worth[: len(row)] == pytest.approx([value for _, value in row], rel=1e-12)


def test_a_device_without_triton_uses_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "paceline.decoding.cuda.gumbel_kernels", raising=False)
    monkeypatch.delattr(cuda, "gumbel_kernels", raising=False)
    assert kernels._tried.__wrapped__(torch.device("cpu")) is None


def test_bounds_exceed_all_noise_of_their_words() -> None:
    """The largest uniform of each first bits, and of all; and they are not much above it."""
    count = len(gumbel_argmax._CEILINGS)
    largest = [((index + 1) * 2**52 // count - 0.5) * 2.0**-52 for index in range(count)]
    noise = np.array([-math.log(-math.log(u)) for u in largest])
    assert bool((noise < gumbel_argmax._CEILINGS).all())
    assert bool((gumbel_argmax._CEILINGS[:-1] - noise[:-1] < 1e-6).all())
    assert largest[-1] == 1 - 2.0**-53


def test_the_lowest_id_among_equals_is_chosen() -> None:
    scores = torch.zeros(3, 5000)
    scores[0, [17, 4000]] = 2.0
    scores[1, [4999, 3]] = 1.0
    assert coupled_choice(scores, [None] * 3).tolist() == [17, 3, 0]
    assert [[token for token, _ in row] for row in ranked(scores, [None] * 3, 3)] == [
        [17, 4000, 0],
        [3, 4999, 0],
        [0, 1, 2],
    ]


def test_choices_follow_the_distribution_within_its_support() -> None:
    p = torch.tensor([0.5, 0.3, 0.0, 0.2])
    n = 20_000
    chosen = coupled_choice(p.log().expand(n, 4), [CoupledNoise(11, position) for position in range(n)])
    counts = torch.bincount(chosen, minlength=4).double()
    assert counts[2] == 0
    expected = p.double() * n
    statistic = float(((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum())
    assert statistic < 13.8  # chi-square, 2 degrees of freedom, level 0.001


def test_coupled_acceptance_follows_the_formula() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.2, 0.4, 0.0, 0.4])
    n = 40_000
    common = [CoupledNoise(12, position) for position in range(n)]
    agree = coupled_choice(p.log().expand(n, 4), common) == coupled_choice(q.log().expand(n, 4), common)
    alpha = coupled_acceptance(p.tolist(), q.tolist())
    assert float(agree.double().mean()) == pytest.approx(alpha, abs=4 * math.sqrt(alpha * (1 - alpha) / n))


def test_an_invalid_row_does_not_affect_others() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    noise = [CoupledNoise(1, position) if position < 3 else None for position in range(4)]
    wanted = ranked(scores, noise, 2)
    scores[1], scores[3] = torch.nan, -torch.inf
    found = ranked(scores, noise, 2)
    assert found[::2] == wanted[::2]
    assert [len(row) for row in found[1::2]] == [1, 1]
    assert coupled_choice(scores, noise).tolist()[::2] == [row[0][0] for row in wanted[::2]]
