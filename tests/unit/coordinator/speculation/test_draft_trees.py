"""What trees bring, against counting in text whose ranks are known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest

from coordinator.speculation.arms import DraftArm, DraftArms
from coordinator.speculation.draft_trees import (
    RANKS,
    DraftWorth,
    TreeGains,
    chain_verdicts,
    tree_tokens,
)
from coordinator.speculation.expected_tokens import ReplayedAcceptance, expected_tokens
from paceline.core.types import TreeShape
from tests.sim.rounds import children, tree

ARMS = DraftArms(8, 32)
RATE = 0.6
SHARES = (RATE, *((1 - RATE) * share for share in RANKS))


def text_of_ranks(length: int, seed: int) -> Iterator[int]:
    """The rank of each token among the draft's; the last stands for none."""
    rng = random.Random(seed)
    weights = (*SHARES, 1 - sum(SHARES))
    return iter(rng.choices(range(len(weights)), weights, k=length))


def paths(arm: DraftArm, ranks: Iterator[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(parents, accepted path) of each round that decodes a text with this tree."""
    proposal = tree(RATE, RANKS, arm.depth, TreeShape(4, arm.nodes))
    after = children(proposal)
    try:
        while True:
            path, at = list[int](), -1
            while at in after and (rank := next(ranks)) < len(after[at]):
                at = after[at][rank]
                path.append(at)
            if at not in after:
                next(ranks)  # the bonus
            yield proposal.parents, tuple(path)
    except StopIteration:
        return


def tokens_a_round(arm: DraftArm, seed: int = 2) -> float:
    made = [len(path) + 1 for _, path in paths(arm, text_of_ranks(40_000, seed))]
    return sum(made) / len(made)


def brute_force(parents: Sequence[int], path: Sequence[int], arm: DraftArm) -> int:
    """Tokens of the first `arm.nodes` of the nodes that are at most `arm.depth` deep."""
    depth = {-1: 0}
    kept: list[int] = []
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
        if depth[node] <= arm.depth and len(kept) < arm.nodes:
            kept.append(node)
    return 1 + sum(node in kept for node in path)


def test_the_best_tree_by_rank_is_counted_right() -> None:
    for arm in (DraftArm(1, 3), DraftArm(2, 8), DraftArm(4, 8), DraftArm(8, 16)):
        assert tree_tokens(RATE, 4, arm) == pytest.approx(tokens_a_round(arm), rel=0.02)
    assert tree_tokens(0.5, 1, DraftArm(8, 8)) == pytest.approx(expected_tokens([0.5] * 8)[-1])
    assert tree_tokens(0.5, 2, DraftArm(1, 8)) == 1.5 + 0.5 * RANKS[0]


def test_one_tree_predicts_every_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.speculation.draft_trees.TREE_MEMORY", math.inf)
    drafts = DraftWorth(ARMS, ReplayedAcceptance(math.inf), TreeGains(ARMS, 4))
    largest = DraftArm(8, 32)
    for parents, path in paths(largest, text_of_ranks(40_000, 1)):
        drafts.observe(largest, parents, path)
    expected = drafts.expected()
    for number in ARMS.trees:
        arm = ARMS.each[number]
        if arm != DraftArm(4, 32):  # which the largest tree does not contain
            assert expected[number] == pytest.approx(tokens_a_round(arm), rel=0.02)
    chain = expected_tokens([RATE] * 8)
    assert expected[:9] == pytest.approx(chain, rel=0.02)


def test_a_smaller_tree_is_the_first_nodes_that_are_not_too_deep() -> None:
    for parents, path in list(paths(DraftArm(8, 32), text_of_ranks(2_000, 3)))[:200]:
        gains = TreeGains(ARMS, 4)
        before = list(gains.made)
        gains.observe(DraftArm(8, 32), parents, path, [1.0] * 9)
        made = [now - old * (1 - 1 / 500) for now, old in zip(gains.made, before, strict=True)]
        for number, more in zip(ARMS.trees, made, strict=True):
            if more > 0.9:
                assert more == pytest.approx(brute_force(parents, path, ARMS.each[number]))
        assert sum(more > 0.9 for more in made) >= 5


def test_a_tree_says_nothing_of_larger_ones() -> None:
    gains = TreeGains(ARMS, 4)
    before = gains.expected(expected_tokens([0.7] * 8))
    for _ in range(300):
        gains.observe(DraftArm(4, 16), (-1,) * 16, (), expected_tokens([0.7] * 8))
    after = gains.expected(expected_tokens([0.7] * 8))
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        arm = ARMS.each[ARMS.trees[i]]
        assert (new < old) == (arm.depth <= 4 and arm.nodes <= 16)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_until_a_tree_was_tried_its_tokens_follow_from_the_chains(rate: float) -> None:
    expected = TreeGains(ARMS, 4).expected(expected_tokens([rate] * 8))
    assert expected == pytest.approx([tree_tokens(rate, 4, ARMS.each[i]) for i in ARMS.trees])
    easy = TreeGains(ARMS, 4).expected(expected_tokens([0.98] * 8))
    assert all(made <= ARMS.each[i].depth + 1 for made, i in zip(easy, ARMS.trees, strict=True))


@pytest.mark.parametrize(
    ("parents", "path", "verdicts"),
    [
        ((-1, 0, 1), (0, 1, 2), [(3, 3)]),
        ((-1, 0, 1), (0,), [(2, 1)]),
        ((-1, 0, 1), (), [(1, 0)]),
        ((-1, -1, 0), (1,), [(1, 0)]),
        ((-1, -1, 1), (1, 2), [(1, 0), (1, 1)]),
        ((-1, 0, 0, 2), (0, 2, 3), [(2, 1), (1, 1)]),
        ((-1, 0, 0, 2), (0, 2), [(2, 1), (1, 0)]),
        ((-1, -1), (0,), [(1, 1)]),
    ],
)
def test_a_tree_is_judged_as_the_chains_of_its_first_children(
    parents: tuple[int, ...], path: tuple[int, ...], verdicts: list[tuple[int, int]]
) -> None:
    assert list(chain_verdicts(parents, path)) == verdicts


def test_arms_that_a_sequence_does_not_use_bring_nothing() -> None:
    chain = ReplayedAcceptance(500)
    chains, trees = DraftWorth(ARMS, chain), DraftWorth(ARMS, chain, TreeGains(ARMS, 3), draws_chains=False)
    assert [made > 0 for made in chains.expected()] == [i not in ARMS.trees for i in range(len(ARMS.each))]
    assert [made > 0 for made in trees.expected()] == [i not in ARMS.chains for i in range(len(ARMS.each))]
