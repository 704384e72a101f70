"""Two algorithms by their own names: iterative speculative sampling, and greedy decoding over several drafts.

Both are what tree acceptance does with particular trees: one of depth 1, and a prefix tree of chains.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch

from paceline.decoding.trees import accept_tree_rejection, walk_coupled
from tests.unit.decoding.test_tree_laws import Model
from tests.unit.decoding.tree_laws import Ask, Path, Row, Strategy, Try, error, merged, residual

ONE = Fraction(1)


def iterative(p: Row, proposals: Sequence[Row], tokens: Sequence[int], tests: Sequence[float]) -> int | Row:
    """Sample from q_1 … q_K in turn before resorting to p: the accepted try, or what is left to draw from."""
    for k, (q, x, u) in enumerate(zip(proposals, tokens, tests, strict=True)):
        if Fraction(u) < min(ONE, p[x] / q[x]):
            return k
        p = residual(p, q)
    return p


def law(p: Row, proposals: Sequence[Row]) -> Row:
    """Exact law of the output token."""
    if not proposals:
        return p
    q, *others = proposals
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
    rejected = ONE - sum(accepted)
    after = law(residual(p, q), others) if rejected else p
    return tuple(a + rejected * b for a, b in zip(accepted, after, strict=True))


def independent(proposals: Sequence[Row]) -> Strategy:
    """One try of each proposal, all after the root."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        return ((), proposals[len(tries)]) if len(tries) < len(proposals) else None

    return ask


def always(p: Row) -> Callable[[Path], Row]:
    """The same distribution after every path."""
    return lambda _: p


CASES = [
    [Model(1, 3)(()), Model(2, 3)(())],
    [Model(1, 4)(()), Model(1, 4)(()), Model(3, 4)(())],
    [Model(4, 4, zeros=2)(()), Model(5, 4, zeros=2)(()), Model(6, 4)(()), Model(7, 4)(())],
]


@pytest.mark.parametrize("proposals", CASES)
def test_the_output_has_the_targets_law(proposals: Sequence[Row]) -> None:
    for seed in range(5):
        p = Model(20 + seed, len(proposals[0]), zeros=seed % 2)(())
        assert law(p, proposals) == p
        assert error(independent(proposals), always(p), 1) == 0


@pytest.mark.parametrize("proposals", CASES)
def test_a_tree_of_depth_1_decides_like_it(proposals: Sequence[Row]) -> None:
    rng = random.Random(len(proposals))
    size = len(proposals[0])
    for _ in range(200):
        p = Model(rng.randrange(1000), size, zeros=rng.randrange(2))(())
        tokens = [rng.choices(range(size), weights=[float(x) for x in q])[0] for q in proposals]
        tests, last = [rng.random() for _ in proposals], rng.random()
        token_ids, parents, nodes = merged([Try((), x, q) for x, q in zip(tokens, proposals, strict=True)])
        decision = accept_tree_rejection(
            token_ids,
            parents,
            torch.tensor([[float(x) for x in p]] * (1 + len(token_ids)), dtype=torch.float64),
            torch.tensor([[float(x) for x in q] for q in proposals], dtype=torch.float64),
            torch.tensor(tests, dtype=torch.float64),
            torch.tensor([last], dtype=torch.float64),
            nodes,
        )
        expected = iterative(p, proposals, tokens, tests)
        if isinstance(expected, int):
            assert decision.path[0].tolist()[0] == nodes[expected]
            continue
        assert decision.path[0].tolist()[0] == -1
        sums = itertools.accumulate(expected)
        assert int(decision.next_token) == next(y for y, total in enumerate(sums) if last < total)


def greedy_of_one(draft: Sequence[int], own: Sequence[int]) -> list[int]:
    """Greedy speculative decoding with one draft: what agrees, then the target's own token."""
    n = next((i for i, (x, y) in enumerate(zip(draft, own, strict=False)) if x != y), len(draft))
    return [*draft[:n], own[n]]


def longest_of_a_batch(drafts: Sequence[Sequence[int]], own: Sequence[int]) -> list[int]:
    """Each draft judged by itself, the longest output taken."""
    return max((greedy_of_one(draft, own) for draft in drafts), key=len)


def test_the_walk_finds_the_longest_of_a_batch() -> None:
    """The greedy target says one sequence, so at each node at most one child can be right."""
    rng = random.Random(3)
    lengths = set()
    for _ in range(500):
        length = rng.randrange(1, 6)
        own = [rng.randrange(3) for _ in range(length + 1)]
        drafts = [[rng.randrange(3) for _ in range(length)] for _ in range(rng.randrange(1, 6))]
        q = (ONE, Fraction(0), Fraction(0))
        tries = [Try(tuple(draft[:i]), x, q) for draft in drafts for i, x in enumerate(draft)]
        token_ids, parents, _ = merged(tries)
        depths = [0]
        for parent in parents:
            depths.append(depths[parent + 1] + 1)
        # The target's choice matters on its own path alone; elsewhere it is anything.
        decision = walk_coupled(token_ids, parents, torch.tensor([own[depth] for depth in depths]))
        path = [node for node in decision.path[0].tolist() if node >= 0]
        output = [*(token_ids[node] for node in path), int(decision.next_token)]
        assert output == longest_of_a_batch(drafts, own)
        lengths.add(len(output))
    assert len(lengths) >= 5
