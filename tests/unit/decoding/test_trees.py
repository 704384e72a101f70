"""Trees: exact losslessness of SpecInfer's recursion, and the walk of coupled decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.decoding.acceptance import Decision, accept_rejection
from paceline.decoding.sampling import point_mass
from paceline.decoding.trees import accept_tree_rejection, children_of, walk_coupled
from target_worker.acceptance.coupled import accept_coupled

Accept = Callable[[Sequence[int], Sequence[int], Tensor, Tensor, Tensor, Tensor], Decision]
LOW, HIGH = 2.0**-60, 1 - 2.0**-53
VOCAB = 3


def random_rows(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(*shape, VOCAB, dtype=torch.float64, generator=generator) ** 2 + 1e-3
    return rows / rows.sum(-1, keepdim=True)


def bisect(holds: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(34):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def without(q: Tensor, taken: Sequence[int]) -> Tensor:
    """q renormalised over what the earlier siblings left."""
    left = q.clone()
    left[list(taken)] = 0
    return left / left.sum()


def error(accept: Accept, parents: Sequence[int], p: Tensor, q: Tensor, *, replacement: bool = True) -> float:
    """Largest difference of the joint distribution of the first two tokens from the target's.

    p and q: [2, V] (a root row, and one that serves after every token) for p; [V] for q. Integrates the
    real function over every tree of draft tokens, every cell of the accept uniforms and the next uniform.
    """
    nodes, children = len(parents), children_of(parents)
    before = {c: family[:i] for family in children for i, c in enumerate(family)}
    joint = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=nodes):
        rows = []
        for node in range(nodes):
            taken = [] if replacement else [tokens[s] for s in before[node]]
            if len(set(taken)) < len(taken):
                break
            rows.append(without(q, taken))
        weight = 1.0
        for node, row in enumerate(rows):
            weight *= float(row[tokens[node]])
        if len(rows) < nodes or weight == 0:
            continue
        q_rows = torch.stack(rows)
        p_rows = torch.stack([p[0]] + [p[1]] * nodes)

        def run(
            u: Sequence[float],
            last: float,
            tokens: Sequence[int] = tokens,
            p_rows: Tensor = p_rows,
            q_rows: Tensor = q_rows,
        ) -> Decision:
            tests = torch.tensor(u, dtype=torch.float64)
            return accept(tokens, parents, p_rows, q_rows, tests, torch.tensor([last], dtype=torch.float64))

        edges = [_edge(run, node, parents, before, nodes) for node in range(nodes)]
        endings: dict[tuple[int, ...], list[float]] = {}
        for cell in itertools.product((0, 1), repeat=nodes):
            width, tests = weight, []
            for above, edge in zip(cell, edges, strict=True):
                width *= 1 - edge if above else edge
                tests.append((1 + edge) / 2 if above else edge / 2)
            if width < 1e-12:
                continue
            path = tuple(n for n in run(tests, 0.5).path[0].tolist() if n >= 0)
            if path not in endings:
                edges_next = [
                    bisect(lambda u, v=v, t=tests: int(run(t, u).next_token) <= v) for v in range(VOCAB)
                ]
                endings[path] = [b - a for a, b in itertools.pairwise([0.0, *edges_next])]
            for last, share in enumerate(endings[path]):
                output = [*(tokens[n] for n in path), last]
                if len(output) >= 2:
                    joint[output[0], output[1]] += width * share
                else:
                    joint[output[0]] += width * share * p[1]
    return float((joint - p[0][:, None] * p[1]).abs().max())


def _edge(
    run: Callable[[Sequence[float], float], Decision],
    node: int,
    parents: Sequence[int],
    before: dict[int, list[int]],
    nodes: int,
) -> float:
    """The breakpoint of one node's uniform, its ancestors accepted and the siblings before rejected."""
    tests = [0.5] * nodes
    above = node
    while above != -1:
        for sibling in before[above]:
            tests[sibling] = HIGH
        tests[above] = LOW
        above = parents[above]

    def accepted(u: float) -> bool:
        return node in run([*tests[:node], u, *tests[node + 1 :]], 0.5).path[0].tolist()

    return bisect(accepted) if accepted(LOW) else 1.0


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("parents", [(-1, -1), (-1, 0), (-1, -1, 0), (-1, -1, -1)])
def test_the_output_has_the_targets_distribution(parents: tuple[int, ...], replacement: bool) -> None:
    p, q = random_rows(1, 2), random_rows(2)
    assert error(accept_tree_rejection, parents, p, q, replacement=replacement) < 1e-6


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (random_rows(3, 2), random_rows(3, 2)[0]),
        (random_rows(4, 2), point_mass(torch.tensor(1), VOCAB)),
        (point_mass(torch.tensor([1, 2]), VOCAB), random_rows(5)),
        (point_mass(torch.tensor([1, 2]), VOCAB), point_mass(torch.tensor(0), VOCAB)),
        (torch.tensor([[0, 0.4, 0.6], [0.3, 0.7, 0]]).double(), torch.tensor([1.0, 0, 0]).double()),
    ],
    ids=["equal", "point-q", "point-p", "both-points", "disjoint"],
)
def test_corner_cases_are_lossless(p: Tensor, q: Tensor) -> None:
    assert error(accept_tree_rejection, (-1, -1), p, q) < 1e-6
    assert error(accept_tree_rejection, (-1, 0), p, q) < 1e-6


@pytest.mark.planted
def test_catches_taking_the_longest_matching_path() -> None:
    """Each path judged alone, the longest taken: not lossless at a temperature."""

    def longest(
        tokens: Sequence[int], parents: Sequence[int], p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
    ) -> Decision:
        assert set(parents) == {-1}
        paths = [
            accept_rejection(
                torch.tensor([[tokens[n]]]),
                torch.tensor([1]),
                p[[0, n + 1]][None],
                q[None, n, None],
                accept_u[None, n, None],
                next_u,
            )
            for n in range(len(parents))
        ]
        best = max(range(len(paths)), key=lambda n: int(paths[n].num_accepted))
        found = paths[best]
        path = torch.where(found.num_accepted[:, None] > 0, torch.tensor([[best]]), -1)
        return Decision(path, found.num_accepted, found.next_token, found.is_bonus)

    p, q = random_rows(1, 2), random_rows(2)
    assert error(longest, (-1,), p, q) < 1e-6
    assert error(longest, (-1, -1), p, q) > 1e-2


def test_a_chain_as_a_tree_decides_like_a_chain() -> None:
    generator = torch.Generator().manual_seed(6)
    for seed in range(50):
        p, q = random_rows(10 + seed, 4), random_rows(100 + seed, 3)
        tokens = torch.randint(0, VOCAB, (3,), generator=generator)
        tests = torch.rand(3, dtype=torch.float64, generator=generator)
        last = torch.rand(1, dtype=torch.float64, generator=generator)
        tree = accept_tree_rejection(tokens.tolist(), (-1, 0, 1), p, q, tests, last)
        chain = accept_rejection(tokens[None], torch.tensor([3]), p[None], q[None], tests[None], last)
        assert_same(tree, chain)
        choices = torch.randint(0, 2, (4,), generator=generator)
        walked = walk_coupled((tokens % 2).tolist(), (-1, 0, 1), choices)
        accepted, token = accept_coupled((tokens % 2).tolist(), choices.tolist())
        assert (int(walked.num_accepted), int(walked.next_token)) == (accepted, token)


def assert_same(a: Decision, b: Decision) -> None:
    assert torch.equal(a.path, b.path)
    assert torch.equal(a.num_accepted, b.num_accepted)
    assert torch.equal(a.next_token, b.next_token)
    assert torch.equal(a.is_bonus, b.is_bonus)


def test_the_coupled_walk_gives_the_targets_own_sequence() -> None:
    """Any tree: the output is a prefix of what the target says alone, and the longest the tree holds."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(200):
        nodes = int(torch.randint(0, 9, (), generator=generator))
        parents = [int(torch.randint(-1, n, (), generator=generator)) if n else -1 for n in range(nodes)]
        tokens = torch.randint(0, VOCAB, (nodes,), generator=generator).tolist()
        own = torch.randint(0, VOCAB, (nodes + 1,), generator=generator).tolist()
        depth = [0]
        for parent in parents:
            depth.append(depth[parent + 1] + 1)
        # The target's choice after a node that does not lie on its own sequence is of no account.
        decision = walk_coupled(tokens, parents, torch.tensor([own[d] for d in depth]))
        path = [n for n in decision.path[0].tolist() if n >= 0]
        assert len(path) == int(decision.num_accepted)
        assert [*(tokens[n] for n in path), int(decision.next_token)] == own[: len(path) + 1]
        assert [parents[n] for n in path] == [-1, *path][: len(path)]
        leaf = not children_of(parents)[path[-1] + 1 if path else 0]
        assert bool(decision.is_bonus) is leaf


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (1, -1)])
def test_a_parent_after_its_child_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        children_of(parents)
    assert error.value.field == "proposal.parents"
