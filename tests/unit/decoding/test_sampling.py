"""Draws, and the sparse form of q."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SparseDistribution
from paceline.decoding.sampling import (
    check_sparse,
    dense_from_sparse,
    draw,
    point_mass,
    to_sparse,
    truncate_support,
)

ENDS = [0.0, 2.0**-53, 0.25, 0.5, 0.999, 1 - 2.0**-53]


def uniform(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 1.0, 0.0],
        [0.0, 0.3, 0.0, 0.7, 0.0],
        [0.1] * 10,
        [1e-30, 0.0, 1.0, 1e-30, 0.0],
        [0.0, 1e-45, 0.0],
        [0.0, 3.0, 0.0, 1.0],
    ],
)
def test_draw_never_returns_a_token_of_probability_zero(row: list[float], dtype: torch.dtype) -> None:
    probabilities = torch.tensor([row], dtype=dtype)
    for u in ENDS:
        assert probabilities[0, draw(probabilities, uniform(u))[0]] > 0


def test_draw_inverts_the_cumulative_distribution() -> None:
    row = torch.tensor([[0.2, 0.0, 0.5, 0.3]], dtype=torch.float64)
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(draw(row.expand(1000, 4), u), minlength=4)
    assert counts.tolist() == [200, 0, 500, 300]
    # Scale does not matter, so sums that are 1 within rounding do no harm.
    assert torch.equal(draw(row.expand(1000, 4) * 1.001, u), draw(row.expand(1000, 4), u))


def test_draw_ignores_rows_that_are_not_numbers() -> None:
    rows = torch.tensor([[torch.nan, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert draw(rows, uniform(0.3, 0.3, 0.3))[1] == 1


def test_a_point_mass_is_one_hot() -> None:
    masses = point_mass(torch.tensor([[2, -1]]), 3)
    assert masses.tolist() == [[[0, 0, 1], [1, 0, 0]]]
    assert masses.dtype == torch.float64


def test_truncation_keeps_the_smallest_sufficient_support() -> None:
    generator = torch.Generator().manual_seed(0)
    p = (torch.randn(20, 300, generator=generator) * 2).softmax(-1)
    p[0] = point_mass(torch.tensor(5), 300).float()
    ids, kept, lengths, mass = truncate_support(p, 0.9, bound=100)
    for r in range(20):
        n = int(lengths[r])
        best = p[r].double().sort(descending=True).values
        assert float(mass[r]) == pytest.approx(float(best[:n].sum()))
        assert float(mass[r]) >= 0.9 or n == 100
        assert n == 1 or float(best[: n - 1].sum()) < 0.9
        assert len(set(ids[r, :n].tolist())) == n
        assert torch.allclose(kept[r, :n].double(), p[r].double()[ids[r, :n]] / mass[r], rtol=1e-6)
        assert not kept[r, n:].any()
    assert lengths[0] == 1
    assert truncate_support(p[:0])[0].shape[0] == 0


@pytest.mark.parametrize("vocab_size", [1, 40, 3000])
def test_the_sent_distribution_is_the_one_drawn_from(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    p = (torch.randn(6, vocab_size, generator=generator) * 3).softmax(-1)
    ids, kept, lengths, _ = truncate_support(p)
    sent = to_sparse(ids, kept, lengths)
    assert [len(d) for d in sent] == lengths.tolist()
    q = dense_from_sparse(sent, vocab_size)
    assert torch.allclose(q.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-14)
    own = kept.double() / kept.double().sum(-1, keepdim=True)
    assert torch.allclose(q.gather(1, ids)[kept > 0], own[kept > 0], rtol=1e-14)
    for u in ENDS:
        drawn = ids.gather(1, draw(kept, torch.full((6,), u, dtype=torch.float64))[:, None])
        assert bool((q.gather(1, drawn) > 0).all())
        check_sparse(sent, vocab_size, drawn[:, 0].tolist())


def sparse(ids: list[int], probabilities: list[float]) -> SparseDistribution:
    return SparseDistribution(np.array(ids, "<u4").tobytes(), np.array(probabilities, "<f4").tobytes())


GOOD = sparse([1, 3], [0.5, 0.25])


@pytest.mark.parametrize(
    "bad",
    [
        sparse([], []),
        sparse([4], [1.0]),
        sparse([2**32 - 1], [1.0]),
        sparse([1, 1], [0.5, 0.5]),
        sparse([1], [0.5, 0.5]),
        sparse([1, 2], [0.5, -0.5]),
        sparse([1, 2], [0.5, math.nan]),
        sparse([1, 2], [0.5, math.inf]),
        sparse([1, 2], [0.0, 0.0]),
        SparseDistribution(b"\0\0\0", b"\0\0\0"),
        sparse(list(range(1025)), [1.0] * 1025),
        SparseDistribution(uniform_over=5),
        SparseDistribution(uniform_over=2**32 - 1),
        SparseDistribution(GOOD.token_ids, GOOD.probabilities, 4),
    ],
)
def test_an_invalid_distribution_is_refused(bad: SparseDistribution) -> None:
    for rebuild in (dense_from_sparse, check_sparse):
        with pytest.raises(InvalidArgumentError) as error:
            rebuild([GOOD, bad], 4)
        assert error.value.field == "proposal.distributions"


def test_a_token_that_cannot_have_been_drawn_is_refused() -> None:
    check_sparse([GOOD, GOOD], 4, [1, 3])
    for token_ids in ([1, 2], [0, 1], [1]):
        with pytest.raises(InvalidArgumentError):
            check_sparse([GOOD, GOOD], 4, token_ids)


def test_a_uniform_distribution_is_rebuilt() -> None:
    """Over the whole vocabulary or its first tokens, between others, and also beyond the bound of lists."""
    uniform = SparseDistribution(uniform_over=3)
    assert len(uniform) == 3
    assert dense_from_sparse([GOOD, uniform], 4).tolist() == [[0, 2 / 3, 0, 1 / 3], [1 / 3] * 3 + [0]]
    assert dense_from_sparse([SparseDistribution(uniform_over=5000)], 5000).unique().tolist() == [1 / 5000]
    check_sparse([GOOD, uniform], 4, [1, 2])
    with pytest.raises(InvalidArgumentError, match="contain the token"):
        check_sparse([GOOD, uniform], 4, [1, 3])


def test_ids_may_repeat_between_distributions() -> None:
    assert dense_from_sparse([GOOD, GOOD], 4).tolist() == [[0, 2 / 3, 0, 1 / 3]] * 2
    assert dense_from_sparse([], 4).shape == (0, 4)
