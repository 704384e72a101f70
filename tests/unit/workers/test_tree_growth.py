"""How draft trees grow, without a model: the best nodes by value, level by level."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from draft_worker.sampling.growth import ROOT, BestNodes, NextToken, path_of
from paceline.core.types import TreeShape

Path = tuple[int, ...]


class Shares:
    """A distribution over tokens after every path, best first."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size

    def __call__(self, path: Path) -> list[NextToken]:
        rng = random.Random(f"{self._seed} {path}")
        weights = [rng.random() ** 3 for _ in range(self._size)]
        row = [NextToken(token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)]
        return sorted(row, key=lambda child: -child.log_share)

    def value(self, path: Path) -> float:
        return sum(
            next(c.log_share for c in self(path[:i]) if c.token_id == token) for i, token in enumerate(path)
        )


def grown(shares: Callable[[Path], list[NextToken] | None], depth: int, shape: TreeShape) -> BestNodes:
    growth = BestNodes(depth, shape)
    while growth.wanted:
        growth.grow([shares((*path_of(growth.pool, node),)) for node in growth.wanted])
    return growth


def paths_of(growth: BestNodes) -> list[Path]:
    return [(*path_of(growth.pool, node),) for node in growth.best()]


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20, 39])
@pytest.mark.parametrize("seed", range(5))
def test_with_a_wide_beam_the_tree_is_the_best_of_all(seed: int, nodes: int) -> None:
    shares, depth = Shares(seed, 3), 3
    everything = [path for d in range(1, depth + 1) for path in itertools.product(range(3), repeat=d)]
    best = sorted(everything, key=lambda path: -shares.value(path))[:nodes]
    assert paths_of(grown(shares, depth, TreeShape(16, nodes))) == best


@pytest.mark.parametrize("seed", range(8))
def test_each_level_feeds_the_best_of_the_newest(seed: int) -> None:
    shares, shape, depth = Shares(seed, 4), TreeShape(2, 7), 4
    values: dict[Path, float] = {}
    growth, fed = BestNodes(depth, shape), [()]
    for level in range(1, depth + 1):
        assert [(*path_of(growth.pool, node),) for node in growth.wanted] == fed
        if not fed:
            break
        growth.grow([shares(path) for path in fed])
        values |= {
            (*path, c.token_id): shares.value((*path, c.token_id)) for path in fed for c in shares(path)[:2]
        }
        best = sorted(values, key=lambda path: -values[path])[:7]
        fed = [path for path in best if len(path) == level][:2] if level < depth else []
    assert paths_of(growth) == best
    assert max(map(len, best)) > 1


@pytest.mark.parametrize("shape", [TreeShape(2, 6), TreeShape(3, 16), TreeShape(4, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_nodes_of_a_proposal_are_the_best_tree_of_as_many(seed: int, shape: TreeShape) -> None:
    growth = grown(Shares(seed, 5), 4, shape)
    whole = growth.proposal()
    assert whole.num_draft_tokens == shape.nodes
    assert whole.depth <= 4
    assert all(parent < node for node, parent in enumerate(whole.parents))
    values = [growth.pool[node].value for node in growth.best()]
    assert values == sorted(values, reverse=True)
    siblings = list(zip(whole.parents, whole.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)
    assert max(whole.parents.count(node) for node in range(-1, len(whole.parents))) <= shape.width
    assert whole.first(2).token_ids == whole.token_ids[:2]


def test_growth_ends_early_where_nothing_new_is_among_the_best() -> None:
    flat = [NextToken(token, math.log(1 / 8)) for token in range(8)]
    growth = BestNodes(5, TreeShape(4, 4))
    growth.grow([flat])
    assert len(growth.wanted) == 4
    growth.grow([flat] * 4)
    assert growth.wanted == [], "every node of the second level is worse than the first four"
    assert growth.proposal().depth == 1


def test_among_equals_the_older_comes_first() -> None:
    growth = grown(lambda path: [NextToken(3, 0.0)], 4, TreeShape(2, 3))
    assert growth.proposal().parents == (-1, 0, 1), "a node never precedes its parent"


def test_a_node_without_a_row_has_no_children() -> None:
    growth = BestNodes(3, TreeShape(2, 8))
    growth.grow([[NextToken(0, math.log(0.6)), NextToken(1, math.log(0.4))]])
    assert growth.wanted == [0, 1]
    growth.grow([None, [NextToken(2, math.log(0.5))]])
    assert [growth.pool[node].parent for node in growth.wanted] == [1]
    growth.grow([None])
    assert (growth.proposal().token_ids, growth.proposal().parents) == ((0, 1, 2), (ROOT, ROOT, 1))
