"""Checks of proposals and verdicts, and the origins of a verdict's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.round.next_round import NextRound
from coordinator.sequence.ranks import ranks
from coordinator.sequence.validation import is_sensible, shortened, verdict_fits, with_origins
from paceline.core.types import CHAIN, Outcome, Proposal, SparseDistribution, TokenOrigin, TreeShape, Verdict

V = 10
TREE = Proposal((5, 6, 7, 8, 9), (-1, -1, 0, 2, 0))
"""5 7 8, 5 9, and 6."""
SHAPE = TreeShape(width=2, nodes=5)
NOTHING = Proposal()
Q = SparseDistribution(b"\1\0\0\0", b"\0\0\x80\x3f")


def judged(*token_ids: int, nodes: tuple[int, ...] = (), base: int = 3) -> Verdict:
    accepted = len(token_ids) - 1
    return Verdict(accepted, token_ids, base + accepted, accepted_nodes=nodes)


@pytest.mark.parametrize(
    ("drafts", "accepted", "last", "origin"),
    [
        ((), 0, 5, TokenOrigin.TARGET),
        ((5, 6), 2, 5, TokenOrigin.BONUS),
        ((5, 6), 1, 7, TokenOrigin.CORRECTION),
        ((5, 6), 0, 6, TokenOrigin.CORRECTION),
        ((5, 6), 1, 6, TokenOrigin.ACCEPTED),  # a grammar gave up behind it
    ],
)
def test_the_last_token_has_its_origin(
    drafts: tuple[int, ...], accepted: int, last: int, origin: TokenOrigin
) -> None:
    verdict = Verdict(accepted, (*drafts[:accepted], last), 9)
    told = with_origins(verdict, Proposal(drafts))
    assert told == [*((token, TokenOrigin.ACCEPTED) for token in drafts[:accepted]), (last, origin)]


@pytest.mark.parametrize(
    ("verdict", "origin"),
    [
        (judged(1), TokenOrigin.CORRECTION),
        (judged(7), TokenOrigin.CORRECTION),  # a node, but not of the root
        (judged(6), TokenOrigin.ACCEPTED),
        (judged(6, 1, nodes=(1,)), TokenOrigin.BONUS),
        (judged(5, 1, nodes=(0,)), TokenOrigin.CORRECTION),
        (judged(5, 9, nodes=(0,)), TokenOrigin.ACCEPTED),
        (judged(5, 9, 1, nodes=(0, 4)), TokenOrigin.BONUS),
        (judged(5, 7, 9, nodes=(0, 2)), TokenOrigin.CORRECTION),
        (judged(5, 7, 8, 1, nodes=(0, 2, 3)), TokenOrigin.BONUS),
    ],
)
def test_the_token_behind_a_path_has_its_origin(verdict: Verdict, origin: TokenOrigin) -> None:
    told = with_origins(verdict, TREE)
    assert told[-1] == (verdict.token_ids[-1], origin)
    assert all(each is TokenOrigin.ACCEPTED for _, each in told[:-1])


@pytest.mark.parametrize(
    "verdict",
    [judged(1), judged(5, 1, nodes=(0,)), judged(6, 1, nodes=(1,)), judged(5, 7, 8, 0, nodes=(0, 2, 3))],
)
def test_a_verdict_on_a_path_of_the_tree_fits(verdict: Verdict) -> None:
    assert verdict_fits(verdict, TREE, 3, V)
    assert not verdict_fits(replace(verdict, num_computed_tokens=7), TREE, 3, V)
    assert not verdict_fits(replace(verdict, token_ids=(*verdict.token_ids[:-1], V)), TREE, 3, V)


@pytest.mark.parametrize(
    "verdict",
    [
        judged(5, 1),  # no nodes
        judged(5, 1, nodes=(1,)),  # another token's node
        judged(7, 1, nodes=(2,)),  # does not begin at the root
        judged(5, 8, 1, nodes=(0, 3)),  # leaves a node out
        judged(6, 7, 1, nodes=(1, 2)),  # another node's child
        judged(5, 7, 1, nodes=(2, 0)),  # the wrong order
        judged(9, 1, nodes=(5,)),  # no node of the tree
        judged(1, nodes=(0,)),  # more nodes than tokens
    ],
)
def test_a_verdict_on_no_path_of_the_tree_does_not_fit(verdict: Verdict) -> None:
    assert not verdict_fits(verdict, TREE, 3, V)


def test_a_verdict_on_a_chain_names_no_nodes() -> None:
    assert verdict_fits(judged(5, 1), Proposal((5, 6)), 3, V)
    assert not verdict_fits(judged(5, 1, nodes=(0,)), Proposal((5, 6)), 3, V)
    assert not verdict_fits(judged(5, 6, 7, 1), Proposal((5, 6)), 3, V)
    assert verdict_fits(judged(1), NOTHING, 3, V)


@pytest.mark.parametrize(
    ("proposal", "most", "shape", "sensible"),
    [
        (Proposal((1, 2)), 2, CHAIN, True),
        (Proposal((1, 2)), 1, CHAIN, False),
        (Proposal((1, V)), 2, CHAIN, False),
        (Proposal((1, 2), (-1, 0)), 2, CHAIN, False),
        (Proposal((1, 2)), 2, SHAPE, True),
        (TREE, 3, SHAPE, True),
        (TREE, 3, CHAIN, False),
        (TREE, 2, SHAPE, False),
        (TREE, 3, TreeShape(1, 5), False),
        (TREE, 3, TreeShape(2, 4), False),
        (replace(TREE, tries=(0, 1, 2, 3, 4, 0)), 3, SHAPE, False),
        (replace(TREE, tries=(0, 1, 2, 3, 4, 0)), 3, TreeShape(2, 6), True),
        (Proposal((1, 2), tries=(0, 1)), 2, CHAIN, False),
        (replace(TREE, token_ids=(5, 6, 7, 8, V)), 3, SHAPE, False),
        (NOTHING, 2, SHAPE, True),
    ],
)
def test_a_proposal_stays_within_its_bounds(
    proposal: Proposal, most: int, shape: TreeShape, sensible: bool
) -> None:
    assert is_sensible(proposal, most, V, shape) is sensible


@pytest.mark.parametrize(
    ("most", "shape", "known", "nodes"),
    [
        (3, SHAPE, NOTHING, 5),
        (3, TreeShape(2, 4), NOTHING, 4),
        (2, SHAPE, NOTHING, 3),  # up to the first node that is too deep
        (1, SHAPE, NOTHING, 2),
        (0, SHAPE, NOTHING, None),
        (3, CHAIN, NOTHING, None),
        (3, SHAPE, TREE.first(3), 5),
        (3, SHAPE, TREE.first(5), None),
        (2, SHAPE, TREE.first(4), None),
        (3, SHAPE, Proposal((5, 6), (-1, 0)), None),  # the same tokens on another path
        (3, SHAPE, Proposal((5,)), None),  # offered as a chain
    ],
)
def test_a_continuing_tree_is_cut_to_its_best_nodes(
    most: int, shape: TreeShape, known: Proposal, nodes: int | None
) -> None:
    cut = None if nodes is None else TREE.first(nodes)
    assert shortened(TREE, most, V, known, shape) == cut


def test_a_continuation_with_distributions_is_not_cut() -> None:
    assert shortened(replace(TREE, distributions=(Q,) * 5), 3, V, NOTHING, SHAPE) is None


def test_offers_are_told_apart_by_the_last_accepted_node() -> None:
    """Two paths of one length with the same token behind them."""
    left, right = Outcome(1, 3, last_node=0), Outcome(1, 3, last_node=1)
    ahead = NextRound()
    ahead.offer({left: TREE, right: Proposal((1, 2))})
    to_the_left = judged(5, 3, nodes=(0,))
    assert ahead.follows(to_the_left) == TREE
    assert ahead.follows(replace(to_the_left, went_on_with=3)) == TREE.first(3)
    assert ahead.follows(judged(6, 3, nodes=(1,))) == Proposal((1, 2))
    assert ahead.follows(judged(3)) is None
    assert ahead.permits(replace(to_the_left, went_on_with=5))
    assert not ahead.permits(replace(to_the_left, went_on_with=6))


def test_ranks_are_places_among_siblings() -> None:
    assert ranks(TREE, (5, 9)) == (0, 1)
    assert ranks(TREE, (5, 7, 8)) == (0, 0, 0)
    assert ranks(TREE, (6,)) == (1,)
    assert ranks(Proposal((5, 6)), (5, 6)) == (0, 0)
    assert ranks(TREE, ()) == ranks(NOTHING, ()) == ()
