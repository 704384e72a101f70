"""Rounds whose proposals are trees."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sequence.messages import DraftReady, Phase, Signal
from paceline.core.errors import InternalError
from paceline.core.messages import Continuations, DraftRound, RoundVerdict, VerifyAhead, VerifyRound
from paceline.core.types import CHAIN, Outcome, Proposal, TreeShape, Verdict
from tests.unit.coordinator.test_round import Driver, error_of, sent
from tests.unit.coordinator.test_round_policy import Scripted

SHAPE = TreeShape(width=2, nodes=6)
TREE = Proposal((5, 6, 7, 8, 9), (-1, -1, 0, 2, 0))
"""5 7 8, 5 9, and 6."""
NEXT = Proposal((2, 3, 4), (-1, -1, 0))


def drafting(
    *, target_nodes: int = 64, draft_nodes: int = 64, takes_trees: bool = True, k: int = 4, **sampling: Any
) -> tuple[Driver, DraftRound]:
    """A sequence that waits for a tree, and what its draft was asked for."""
    it = Driver(k=5, **sampling)
    it.take_policy(Scripted([k] * 9, tree=SHAPE))
    planner = it.state.planner
    planner.takes_trees, planner.target_max_nodes = takes_trees, target_nodes
    it.state.drafts[0].max_nodes = draft_nodes
    it(DraftReady())
    it(Signal.TARGET_READY)
    command = sent(it.judge(4))[-1]
    assert isinstance(command, DraftRound)
    return it, command


def verifying(**options: Any) -> Driver:
    it, _ = drafting(**options)
    (command,) = sent(propose(it, TREE))
    assert isinstance(command, VerifyRound)
    assert command.proposal == TREE
    return it


def propose(it: Driver, proposal: Proposal) -> list[Any]:
    return it.propose(proposal=proposal)


def judge(it: Driver, *token_ids: int, went_on_with: int | None = None, proposal: Proposal = TREE) -> Any:
    """The verdict that accepts the path of these tokens but the last one."""
    nodes: list[int] = []
    for token in token_ids[:-1]:
        parent = nodes[-1] if nodes else None
        nodes.append(next(c for c in proposal.children_of(parent) if proposal.token_ids[c] == token))
    n = len(nodes)
    verdict = Verdict(n, token_ids, it.length + n, went_on_with=went_on_with, accepted_nodes=tuple(nodes))
    return it(RoundVerdict("s", 1, it.state.round, verdict))


def foresee(it: Driver, proposals: dict[Outcome, Proposal]) -> list[Any]:
    return sent(it(Continuations("s", 1, it.state.round, it.length, proposals)))


def test_the_draft_is_asked_for_a_tree() -> None:
    _, command = drafting()
    assert (command.num_draft_tokens, command.shape) == (4, SHAPE)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"target_nodes": 3}, TreeShape(2, 3)),
        ({"draft_nodes": 4}, TreeShape(2, 4)),
        ({"target_nodes": 0}, CHAIN),
        ({"draft_nodes": 0}, CHAIN),
        ({"takes_trees": False}, CHAIN),
    ],
    ids=["the target's bound", "the draft's bound", "target", "draft", "mode"],
)
def test_a_tree_is_within_what_both_workers_take(options: dict[str, Any], shape: TreeShape) -> None:
    _, command = drafting(**options)
    assert command.shape == shape


def test_a_path_is_committed_and_counted() -> None:
    it = verifying()
    judge(it, 5, 9, 1)
    assert it.generated == [4, 5, 9, 1]
    record, stats = it.state.committed, it.state.stats
    assert record is not None
    assert (record.num_draft, record.depth, record.num_accepted, record.num_judged) == (5, 3, 2, 2)
    assert record.accepted_ranks == (0, 1)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 2)
    assert (stats.histogram, stats.reached, stats.accepted_at) == ([0, 0, 1, 0], [1, 1, 0], [1, 1, 0])
    assert it.phase is Phase.DRAFTING


def test_the_target_knows_the_path_that_it_accepted() -> None:
    it = verifying()
    judge(it, 5, 9, 1)
    (command,) = sent(propose(it, Proposal()))
    assert (command.base_length, command.committed_tail) == (it.length, ())


def test_a_correction_inside_the_tree_counts_its_position() -> None:
    it = verifying()
    judge(it, 5, 1)
    assert it.state.stats.reached == [1, 1, 0]
    assert it.state.stats.accepted_at == [1, 0, 0]


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal((5, 6, 7, 8, 9), (-1, 0, 1, 2, 3)),  # deeper than K
        Proposal((1, 2, 3), (-1, -1, -1)),  # wider than asked
        Proposal(tuple(range(7)), (-1, -1, 0, 0, 1, 1, 2)),  # more nodes than asked
    ],
    ids=["deep", "wide", "large"],
)
def test_a_tree_beyond_its_bounds_is_left_out(proposal: Proposal) -> None:
    it, _ = drafting()
    (command,) = sent(propose(it, proposal))
    assert command.proposal == Proposal()
    assert it.state.drafts[0].failures == 1


def test_a_verdict_on_no_path_fails_the_sequence() -> None:
    it = verifying()
    verdict = Verdict(2, (5, 8, 1), it.length + 2, accepted_nodes=(0, 3))
    assert isinstance(error_of(it(RoundVerdict("s", 1, 2, verdict))), InternalError)


def test_a_foreseen_tree_is_begun_by_the_target() -> None:
    it = verifying()
    outcome = Outcome(2, 1, last_node=4)
    (ahead,) = foresee(it, {outcome: NEXT})
    assert ahead == VerifyAhead("s", 1, 2, it.length, {outcome: NEXT})
    (follow,) = sent(judge(it, 5, 9, 1, went_on_with=3))
    assert (follow.proposal_known, follow.num_draft_tokens, follow.num_lookahead_tokens) == (True, 2, 4)
    assert follow.shape == SHAPE
    assert it.state.present.proposal == NEXT
    judge(it, 2, 4, 1, proposal=NEXT)
    assert it.generated == [4, 5, 9, 1, 2, 4, 1]
    assert it.state.stats.num_lookahead_hits == 1


def test_a_target_may_begin_with_the_first_nodes() -> None:
    it = verifying()
    foresee(it, {Outcome(2, 1, 4): NEXT.first(2)})
    (ahead,) = foresee(it, {Outcome(2, 1, 4): NEXT})
    assert ahead.proposals == {Outcome(2, 1, 4): NEXT}
    (follow,) = sent(judge(it, 5, 9, 1, went_on_with=2))
    assert follow.num_draft_tokens == 1
    judge(it, 3, 1, proposal=NEXT.first(2))
    assert it.generated[-2:] == [3, 1]


def test_a_tree_that_contradicts_an_earlier_one_is_not_passed_on() -> None:
    it = verifying()
    foresee(it, {Outcome(2, 1, 4): NEXT.first(2)})
    assert foresee(it, {Outcome(2, 1, 4): Proposal((2, 3, 4), (-1, 0, 1))}) == []


def test_room_is_for_the_depth_of_a_tree() -> None:
    """Five nodes of three levels, where only four more tokens may come."""
    it = verifying(max_tokens=5, k=3)
    assert it.state.present.num_wanted == 3
    judge(it, 5, 7, 8, 1)
    assert it.generated == [4, 5, 7, 8, 1]
    assert it.phase is Phase.DONE


def test_a_begun_tree_is_cut_to_the_remaining_depth() -> None:
    it = verifying(max_tokens=6)
    (ahead,) = foresee(it, {Outcome(2, 1, 4): NEXT, Outcome(0, 1): NEXT})
    assert ahead.proposals == {Outcome(2, 1, 4): NEXT.first(2), Outcome(0, 1): NEXT}


def test_an_end_inside_an_accepted_path_clips_it() -> None:
    it = verifying(stop_token_ids=(9,))
    judge(it, 5, 9, 1)
    assert it.generated[-2:] == [5, 9]
    assert it.phase is Phase.DONE
    assert it.state.committed is not None
    assert it.state.committed.accepted_ranks == (0, 1)
    assert it.state.stats.reached == [1, 1, 0]


def test_an_accepted_leaf_may_be_the_grammars_end() -> None:
    it = verifying()
    judge(it, 5, 9)
    assert it.state.committed is not None
    assert it.state.committed.num_accepted == 2
    assert it.state.committed.accepted_ranks == (0, 1)
    assert it.state.committed.num_judged == 2
