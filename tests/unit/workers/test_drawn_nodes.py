"""Trees of drawn tokens: the real growth draws them, and judged as sent, the output has the target's law."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from draft_worker.sampling.drawn_nodes import DrawnNodes
from draft_worker.sampling.growth import path_of
from paceline.core.types import Proposal, SparseDistribution, TreeShape
from tests.unit.decoding.tree_laws import Ask, Path, Row, Strategy, Try, drawn, error

Rows = Callable[[Path], SparseDistribution | None]


def sparse(weights: dict[int, float]) -> SparseDistribution:
    values = np.array([*weights.values()], dtype="<f4")
    return SparseDistribution(np.array([*weights], dtype="<u4").tobytes(), values.tobytes())


def weights_of(q: SparseDistribution) -> dict[int, Fraction]:
    """Exact, in the order in which they are inverted."""
    ids, values = np.frombuffer(q.token_ids, "<u4"), np.frombuffer(q.probabilities, "<f4")
    return {int(token): Fraction(float(value)) for token, value in zip(ids, values, strict=True)}


def row_of(q: SparseDistribution, size: int) -> Row:
    weights = weights_of(q)
    return tuple(weights.get(token, Fraction(0)) / sum(weights.values()) for token in range(size))


class Draft:
    """A distribution after each path, over `fewest` tokens or more."""

    def __init__(self, seed: int, size: int, fewest: int = 1) -> None:
        self._seed, self.size, self._fewest = seed, size, fewest

    def __call__(self, path: Path) -> SparseDistribution:
        rng = random.Random(f"{self._seed} {path}")
        tokens = sorted(rng.sample(range(self.size), rng.randint(self._fewest, self.size)))
        return sparse({token: rng.random() + 0.05 for token in tokens})


class Target:
    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size

    def __call__(self, path: Path) -> Row:
        rng = random.Random(f"{self._seed} {path}")
        weights = [rng.randint(1, 9) for _ in range(self._size)]
        return tuple(Fraction(weight, sum(weights)) for weight in weights)


def grown(rows: Rows, depth: int, shape: TreeShape, uniforms: Sequence[float]) -> DrawnNodes:
    growth = DrawnNodes(depth, shape, uniforms)
    while growth.wanted:
        growth.grow([rows((*path_of(growth.pool, node),)) for node in growth.wanted])
    return growth


class Enumerated:
    """The real growth, whose numbers are chosen so that it draws given tokens."""

    def __init__(self, rows: Draft, depth: int, shape: TreeShape) -> None:
        self._rows, self._depth, self._shape = rows, depth, shape
        self._uniforms: dict[tuple[int, ...], list[float]] = {(): []}

    def tries(self, tokens: tuple[int, ...]) -> list[Try]:
        """Of the tree whose first tries draw these tokens."""
        numbers = self._uniforms[tokens] + [0.5] * (self._shape.nodes - len(tokens))
        growth = grown(self._rows, self._depth, self._shape, numbers)
        sent = growth.proposal()
        assert sent.token_ids[: len(tokens)] == tokens
        found = []
        for node, (token, q) in enumerate(zip(sent.token_ids, sent.distributions, strict=True)):
            after = (*(sent.token_ids[i] for i in sent.path_to(node)[:-1]),)
            found.append(Try(after, token, row_of(q, self._rows.size)))
        if len(found) > len(tokens):
            self._tell(tokens, sent.distributions[len(tokens)])
        return found

    def _tell(self, tokens: tuple[int, ...], q: SparseDistribution) -> None:
        """Learn the numbers by which the next try draws each token: the middle of its share."""
        weights, running = weights_of(q), Fraction(0)
        for token, weight in weights.items():
            number = float((running + weight / 2) / sum(weights.values()))
            self._uniforms[*tokens, token] = [*self._uniforms[tokens], number]
            running += weight

    def __call__(self, tries: Sequence[Try]) -> Ask | None:
        tokens = (*(each.token for each in tries),)
        found = self.tries(tokens)
        if len(found) == len(tokens):
            return None
        return found[len(tokens)].after, found[len(tokens)].q


SHAPES = [(2, TreeShape(2, 4)), (2, TreeShape(3, 5)), (1, TreeShape(3, 3)), (3, TreeShape(2, 4))]


@pytest.mark.parametrize(("depth", "shape"), SHAPES)
@pytest.mark.parametrize("fewest", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_output_has_the_targets_law(depth: int, shape: TreeShape, fewest: int, seed: int) -> None:
    strategy: Strategy = Enumerated(Draft(seed, 3, fewest), depth, shape)
    assert error(strategy, Target(seed, 3), depth + 1) == 0


def test_four_tokens_and_a_support_without_the_targets_favourite() -> None:
    strategy: Strategy = Enumerated(Draft(5, 4, 2), 2, TreeShape(3, 5))
    assert error(strategy, Target(9, 4), 3) == 0


def unlikely_dropped(tries: Sequence[Try]) -> list[Try]:
    """Leaves out what had a small probability, and what follows it."""
    gone = [(*t.after, t.token) for t in tries if t.q[t.token] < Fraction(1, 3)]
    return [t for t in tries if not any((*t.after, t.token)[: len(path)] == path for path in gone)]


def sorted_siblings(tries: Sequence[Try]) -> list[Try]:
    """Likelier siblings first."""
    return sorted(tries, key=lambda t: (len(t.after), -t.q[t.token]))


def not_renormalised(tries: Sequence[Try]) -> list[Try]:
    """Each sibling is said to be drawn from what the first was."""
    first: dict[Path, Row] = {}
    return [replace(t, q=first.setdefault(t.after, t.q)) for t in tries]


def cut_to_likely(tries: Sequence[Try]) -> list[Try]:
    """Keeps the likeliest half, with their ancestors."""
    values: dict[Path, Fraction] = {(): Fraction(1)}
    for t in tries:
        values[*t.after, t.token] = values[t.after] * t.q[t.token]
    kept = sorted(values, key=lambda path: -values[path])[: 1 + len(tries) // 2]
    return [t for t in tries if (*t.after, t.token) in kept]


@pytest.mark.planted
@pytest.mark.parametrize("bug", [unlikely_dropped, sorted_siblings, not_renormalised, cut_to_likely])
def test_a_biased_tree_is_noticed(bug: Callable[[Sequence[Try]], list[Try]]) -> None:
    strategy: Strategy = Enumerated(Draft(5, 4, 3), 2, TreeShape(3, 5))
    assert error(strategy, Target(9, 4), 3) == 0
    assert error(strategy, Target(9, 4), 3, bug) > Fraction(1, 1000)


def test_a_draw_inverts_the_values_at_every_border() -> None:
    values = {0: 0.25, 3: 0.0, 5: 0.5, 9: 0.25, 11: 0.0}
    for u, token in [(1e-16, 0), (0.2499, 0), (0.25, 5), (0.7499, 5), (0.75, 9), (1 - 2**-53, 9)]:
        growth = grown(lambda path: sparse(values), 1, TreeShape(2, 1), [u])
        assert growth.proposal().token_ids == (token,)


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("nodes", [1, 3, 7, 16, 40])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_shape_is_kept_and_its_depth_reached(depth: int, nodes: int, width: int) -> None:
    rng = random.Random(f"{depth} {nodes} {width}")
    draft = Draft(3, 12, 12)
    growth = grown(draft, depth, TreeShape(width, nodes), [rng.random() for _ in range(nodes)])
    sent = growth.proposal()
    everywhere = sum(width**level for level in range(1, depth + 1))
    assert sent.num_draft_tokens == min(nodes, everywhere)
    assert sent.depth == min(depth, nodes)
    assert max(sent.parents.count(node) for node in range(-1, nodes)) <= width
    siblings = list(zip(sent.parents, sent.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)


def test_later_siblings_are_drawn_from_what_the_earlier_left() -> None:
    growth = grown(Draft(3, 6, 6), 3, TreeShape(3, 12), [0.1, 0.5, 0.9] * 4)
    sent = growth.proposal()
    assert max(map(sent.parents.count, range(-1, 12))) == 3
    for node, q in enumerate(sent.distributions):
        path = (*(sent.token_ids[i] for i in sent.path_to(node)[:-1]),)
        before = [sent.token_ids[i] for i in range(node) if sent.parents[i] == sent.parents[node]]
        left = {t: w for t, w in weights_of(Draft(3, 6, 6)(path)).items() if t not in before}
        assert weights_of(q) == left, "the same float32 values, without those that are gone"


def test_few_tokens_have_few_children() -> None:
    growth = grown(lambda path: sparse({4: 0.5, 7: 0.5, 8: 0.0}), 2, TreeShape(4, 12), [0.5] * 12)
    assert growth.proposal().parents.count(-1) == 2
    assert growth.proposal().num_draft_tokens == 6


def test_a_uniform_distribution_has_one_child() -> None:
    growth = grown(lambda path: SparseDistribution(uniform_over=5000), 3, TreeShape(4, 12), [0.999] * 12)
    assert growth.proposal() == Proposal(
        (4995,) * 3, (-1, 0, 1), (SparseDistribution(uniform_over=5000),) * 3
    )


def test_what_is_drawn_stays_where_a_row_is_missing() -> None:
    def rows(path: Path) -> SparseDistribution | None:
        return None if len(path) == 2 else sparse({1: 0.6, 2: 0.4})

    sent = grown(rows, 4, TreeShape(2, 8), [0.3] * 8).proposal()
    assert sent.depth == 2
    assert sent.num_draft_tokens == len(sent.distributions) == 5


@pytest.mark.parametrize("level", [1, 2])
def test_which_nodes_are_fed_depends_on_earlier_levels_only(level: int) -> None:
    """All draws of a level are planned before its rows are seen."""
    shapes = set()
    for tokens in itertools.product([0.1, 0.5, 0.9], repeat=3):
        growth = DrawnNodes(4, TreeShape(3, 12), [*tokens, *[0.5] * 9])
        for _ in range(level):
            growth.grow([Draft(3, 6, 6)((*path_of(growth.pool, node),)) for node in growth.wanted])
        shapes.add((tuple(growth.wanted), tuple(node.parent for node in growth.pool)))
    assert len(shapes) == 1, "ranks alone decide"


def numbers_used(draft: Any, shape: TreeShape) -> list[int]:
    """Which number each try is drawn by: a change of one changes that try's token first."""
    base = grown(draft, 2, shape, [0.5] * shape.nodes).proposal().token_ids
    first = []
    for i in range(shape.nodes):
        numbers = [0.5] * shape.nodes
        numbers[i] = 0.01
        other = grown(draft, 2, shape, numbers).proposal().token_ids
        first.append(next(t for t, pair in enumerate(zip(base, other, strict=True)) if pair[0] != pair[1]))
    return first


def test_try_t_is_drawn_by_number_t() -> None:
    assert numbers_used(Draft(3, 9, 9), TreeShape(3, 6)) == list(range(6))


def test_all_trees_are_enumerated() -> None:
    strategy = Enumerated(Draft(0, 3, 3), 2, TreeShape(2, 4))
    assert sum(weight for weight, _ in drawn(strategy)) == 1
