"""The compiled draw from a truncated support against sorting, and against what is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.types import SparseDistribution
from paceline.decoding.sampling import check_sparse, truncate_support
from paceline.decoding.support import draw_sparse


def halves(rows: int) -> torch.Tensor:
    return torch.full((rows,), 0.5, dtype=torch.float64)


def parts(sparse: SparseDistribution) -> tuple[np.ndarray, np.ndarray]:
    ids, probabilities = sparse.token_ids, sparse.probabilities
    return np.frombuffer(ids, "<u4"), np.frombuffer(probabilities, "<f4").astype(np.float64)


@pytest.mark.parametrize("vocab_size", [1, 2, 40, 300, 3000])
@pytest.mark.parametrize("sharp", [0.5, 2.0, 6.0])
@pytest.mark.parametrize(("mass", "bound"), [(0.3, 1024), (0.9, 7), (0.995, 1024), (0.9, 1)])
def test_the_support_is_the_smallest_sufficient(
    vocab_size: int, sharp: float, mass: float, bound: int
) -> None:
    scores = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * sharp
    ids, probabilities, lengths, _ = truncate_support(scores.double().softmax(-1), mass, bound)
    tokens, found = draw_sparse(scores, halves(6), mass, bound)
    check_sparse(found, vocab_size, tokens)
    for r, sparse in enumerate(found):
        own, values = parts(sparse)
        n = int(lengths[r])
        order = ids[r, :n].argsort()
        assert own.tolist() == ids[r, :n][order].tolist()
        np.testing.assert_allclose(values, probabilities[r, :n][order], rtol=1e-5)


def test_the_lowest_ids_among_equals_are_kept() -> None:
    scores = torch.zeros(1, 100)
    scores[0, 50] = 1.0
    (sparse,) = draw_sparse(scores, halves(1), 0.9, 10)[1]
    assert parts(sparse)[0].tolist() == [*range(9), 50]
    (sparse,) = draw_sparse(torch.zeros(1, 100), halves(1), 0.1, 1024)[1]
    assert parts(sparse)[0].tolist() == [*range(10)]


def test_the_whole_mass_is_every_unfiltered_token() -> None:
    scores = torch.tensor([[0.0, -torch.inf, -30.0, 1.0], [-torch.inf, -torch.inf, -5.0, -torch.inf]])
    tokens, found = draw_sparse(scores, halves(2), 1.0, 1024)
    assert [parts(sparse)[0].tolist() for sparse in found] == [[0, 2, 3], [2]]
    assert tokens[1] == 2
    assert parts(found[1])[1].tolist() == [1.0]


def test_the_draw_inverts_the_sent_distribution() -> None:
    """Every token is drawn for the uniforms between its cumulative shares of the float32 values."""
    scores = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    (sparse,) = draw_sparse(scores, halves(1), 0.95, 1024)[1]
    ids, values = parts(sparse)
    edges = np.cumsum(values) / values.sum()
    near = 1e-12
    for at, token in enumerate(ids):
        low, high = (edges[at - 1] if at else 0.0) + near, edges[at] - near
        uniforms = torch.tensor([max(low, 2.0**-53), (low + high) / 2, high], dtype=torch.float64)
        assert draw_sparse(scores.expand(3, 30), uniforms, 0.95, 1024)[0] == [token] * 3
    for u in (2.0**-53, 1 - 2.0**-53):
        (token,), _ = draw_sparse(scores, torch.tensor([u], dtype=torch.float64), 0.95, 1024)
        assert token == ids[0 if u < 0.5 else -1]


def test_a_token_without_probability_is_never_drawn() -> None:
    """float32 rounds half of its least number to nothing, and it is kept: summed in the order of ids, the
    whole mass is more than what the likely tokens have. A uniform of 1 lifts the point to the total itself.
    """
    scores = torch.tensor([[-103.0, -36.6415, -36.4367, -36.2668, 0.0, 0.0, -103.0]])
    for u in (2.0**-53, 1 - 2.0**-53, 1.0):
        (token,), (sparse,) = draw_sparse(scores, torch.tensor([u], dtype=torch.float64), 1.0, 1024)
        ids, values = parts(sparse)
        assert ids.tolist() == [*range(7)]
        assert values[0] == values[-1] == 0
        assert values[token] > 0
        check_sparse([sparse], 7, [token])


def test_an_invalid_row_does_not_affect_others() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    want = draw_sparse(scores, halves(4), 0.9, 20)
    for bad in (torch.nan, torch.inf):
        broken = scores.clone()
        broken[1, 7], broken[2] = bad, -torch.inf
        tokens, found = draw_sparse(broken, halves(4), 0.9, 20)
        for r in (0, 3):
            assert (tokens[r], found[r]) == (want[0][r], want[1][r])


def test_slices_of_wider_rows_and_empty_rows_are_drawn() -> None:
    wide = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    assert draw_sparse(wide[:, :50], halves(3), 0.9, 20) == draw_sparse(
        wide[:, :50].clone(), halves(3), 0.9, 20
    )
    assert draw_sparse(wide[:0], halves(0), 0.9, 20) == ([], [])


def test_a_uniform_row_has_a_closed_form() -> None:
    """Beyond the bound nothing is cut; rows of which some tokens are filtered are."""
    scores = torch.randn(4, 100, generator=torch.Generator().manual_seed(5))
    scores[1], scores[2] = -2.5, 0.0
    scores[2, 50] = -torch.inf
    tokens, found = draw_sparse(scores, halves(4), 1.0, 99)
    assert [sparse.uniform_over for sparse in found] == [0, 100, 0, 0]
    assert (tokens[1], found[1]) == (50, SparseDistribution(uniform_over=100))
    assert len(found[2]) == 99
    assert not draw_sparse(scores, halves(4), 1.0, 100)[1][1].uniform_over
    assert not draw_sparse(torch.full((1, 100), -torch.inf), halves(1), 1.0, 99)[1][0].uniform_over
    check_sparse(found[1:2], 100, tokens[1:2])


def test_a_uniform_draw_gives_each_token_its_share() -> None:
    cells = 7 * 30
    middles = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    tokens, _ = draw_sparse(torch.zeros(cells, 30), middles, 0.9, 10)
    assert tokens == [cell // 7 for cell in range(cells)]
    for u, token in ((2.0**-53, 0), (1 - 2.0**-53, 29)):
        assert draw_sparse(torch.zeros(1, 30), torch.tensor([u], dtype=torch.float64), 0.9, 10)[0] == [token]
