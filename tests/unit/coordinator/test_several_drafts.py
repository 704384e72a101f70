"""Rounds for which several drafts propose: late, failing, dead and returning ones cost their branch only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.proposers.merged import merged
from coordinator.sequence.messages import (
    Action,
    DraftLeft,
    DraftLost,
    DraftReady,
    Emit,
    FromDraft,
    FromTarget,
    Phase,
    Signal,
    ToDraft,
    ToTarget,
)
from paceline.core.errors import InternalError, InvalidArgumentError, NotFoundError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import (
    CHAIN,
    AcceptanceMode,
    Outcome,
    Proposal,
    SparseDistribution,
    Timings,
    TreeShape,
    Verdict,
)
from tests.unit.coordinator.machines import make_machine
from tests.unit.coordinator.test_round_policy import Scripted

PROMPT = (1, 2, 3)
Q = SparseDistribution(uniform_over=20)


class Several:
    """A sequence with several drafts, which waits for its first proposals at 0 seconds."""

    def __init__(
        self,
        drafts: int = 2,
        *,
        ready: int | None = None,
        k: int = 3,
        tree: TreeShape = CHAIN,
        mode: AcceptanceMode = AcceptanceMode.COUPLED,
        target_nodes: int = 64,
        max_nodes: int = 64,
        max_tokens: int = 50,
    ) -> None:
        self.machine = make_machine(PROMPT, k, drafts=drafts, draft_max_len=100, max_tokens=max_tokens)
        self.state, self.now = self.machine.state, 0.0
        self.policy = Scripted([k] * 20, tree=tree)
        self.state.params = replace(self.state.params, mode=mode)
        planner = self.state.planner
        planner.policy = self.policy  # type: ignore[assignment]
        planner.takes_trees, planner.target_max_nodes, planner.max_tree_nodes = True, target_nodes, max_nodes
        for draft in self.state.drafts.views:
            draft.max_nodes = 64
        for number in range(drafts if ready is None else ready):
            self(DraftReady(number))
        self.opened = self(Signal.TARGET_READY)
        self.asked = self.judge(Proposal(), 4)

    def __call__(self, event: Any) -> list[Action]:
        return self.machine.handle(event, self.now)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def propose(self, draft: int, proposal: Proposal, compute: float = 0.0) -> list[Action]:
        state = self.state
        place = state.drafts[draft].epoch, state.round, len(state.ledger)
        event = DraftProposal("s", *place, proposal, len(state.ledger), Timings(compute=compute, sequences=1))
        return self(FromDraft(event, draft))

    def fail(self, draft: int, error: Any) -> list[Action]:
        state = self.state
        failure = SequenceFailed("s", state.drafts[draft].epoch, state.round, error)
        return self(FromDraft(failure, draft))

    def judge(self, proposal: Proposal, *token_ids: int) -> list[Action]:
        """The verdict that accepts all of these tokens but the last."""
        nodes: list[int] = []
        for token in token_ids[:-1] if proposal.parents else ():
            parent = nodes[-1] if nodes else None
            nodes.append(next(c for c in proposal.children_of(parent) if proposal.token_ids[c] == token))
        n, state = len(token_ids) - 1, self.state
        verdict = Verdict(n, token_ids, len(state.ledger) + n, accepted_nodes=tuple(nodes))
        return self(RoundVerdict("s", state.target.epoch, state.round, verdict))

    def late(self, seconds: float = 1.0) -> list[Action]:
        self.now += seconds
        return self(Signal.DEADLINE)

    @property
    def generated(self) -> list[int]:
        return self.state.ledger.token_ids[len(PROMPT) :]


def rounds(actions: list[Action]) -> dict[int, DraftRound]:
    """What each draft is asked for."""
    found = [a for a in actions if isinstance(a, ToDraft) and isinstance(a.command, DraftRound)]
    return {action.draft: action.command for action in found}  # type: ignore[misc]


def verified(actions: list[Action]) -> Proposal:
    """The proposal that the target gets."""
    sent = [a.command for a in actions if isinstance(a, ToTarget) and isinstance(a.command, VerifyRound)]
    (command,) = sent
    return command.proposal


def test_all_drafts_are_opened_and_asked_at_once() -> None:
    it = Several(3)
    opened = [a for a in it.opened if isinstance(a, ToDraft)]
    assert [(a.draft, a.command.params.draft_index) for a in opened] == [(0, 0), (1, 1), (2, 2)]  # type: ignore[union-attr]
    assert len({a.command.epoch for a in opened}) == 3
    asked = rounds(it.asked)
    assert list(asked) == [0, 1, 2]
    assert [c.num_draft_tokens for c in asked.values()] == [3, 3, 3]
    assert all(c.shape == CHAIN and c.no_lookahead for c in asked.values())
    assert it.phase is Phase.DRAFTING


def test_a_round_waits_for_all_and_merges_them_in_their_order() -> None:
    it = Several()
    assert it.propose(1, Proposal((7, 9))) == []
    whole = verified(it.propose(0, Proposal((7, 8))))
    assert whole == merged([Proposal((7, 8)), Proposal((7, 9))]) == Proposal((7, 8, 9), (-1, 0, 0))
    asked = rounds(it.judge(whole, 7, 9, 1))
    assert it.generated == [4, 7, 9, 1]
    assert [c.committed_tail for c in asked.values()] == [(7, 9, 1)] * 2
    assert it.state.committed is not None
    assert it.state.committed.accepted_ranks == (0, 1)


def test_the_slowest_draft_counts_as_drafting() -> None:
    it = Several()
    it.policy.told()
    it.now = 0.25
    it.propose(0, Proposal((7,)), compute=0.125)
    it.now = 0.75
    it.propose(1, Proposal((8,)), compute=0.5)
    assert it.policy.told()[:2] == [("on_proposal", 2, 0.75, 4), ("on_verify", 2, False)]
    assert it.state.times.draft == 0.5
    assert it.state.present.record.draft_waited == 0.75


@pytest.mark.parametrize(
    ("options", "depths", "shapes"),
    [
        ({"max_nodes": 4}, [2, 2], [CHAIN, CHAIN]),
        ({"target_nodes": 3}, [1, 1], [CHAIN, CHAIN]),
        ({"target_nodes": 1}, [3], [CHAIN]),
        ({"target_nodes": 0}, [3], [CHAIN]),
        ({"drafts": 1, "max_nodes": 2}, [3], [CHAIN]),
        ({"tree": TreeShape(2, 10)}, [3, 3], [TreeShape(2, 5)] * 2),
        ({"tree": TreeShape(2, 10), "drafts": 4}, [2] * 4, [TreeShape(2, 2)] * 4),
        ({"tree": TreeShape(2, 10), "drafts": 1}, [3], [TreeShape(2, 10)]),
        ({"tree": TreeShape(2, 10), "target_nodes": 6}, [3, 3], [TreeShape(2, 3)] * 2),
        ({"max_tokens": 4}, [2, 2], [CHAIN, CHAIN]),
    ],
)
def test_each_draft_has_its_share_of_the_round(
    options: dict[str, Any], depths: list[int], shapes: list[TreeShape]
) -> None:
    asked = rounds(Several(**options).asked)
    assert [c.num_draft_tokens for c in asked.values()] == depths
    assert [c.shape for c in asked.values()] == shapes
    assert [c.no_lookahead for c in asked.values()] == [len(asked) > 1] * len(asked)


def test_a_draft_without_trees_proposes_a_chain_beside_one_with_trees() -> None:
    it = Several(tree=TreeShape(2, 10))
    it.state.drafts[1].max_nodes = 0
    it.propose(0, Proposal())
    asked = rounds(it.judge(verified(it.propose(1, Proposal())), 5))
    assert [c.shape for c in asked.values()] == [TreeShape(2, 5), CHAIN]


def test_a_draft_at_its_greatest_length_is_not_asked() -> None:
    it = Several()
    it.state.drafts[0].max_len = 4
    it.propose(0, Proposal())
    asked = rounds(it.judge(verified(it.propose(1, Proposal())), 5))
    assert [(number, c.num_draft_tokens) for number, c in asked.items()] == [(1, 3)]


def test_a_proposal_beyond_its_share_is_left_out() -> None:
    it = Several(max_nodes=4)
    it.propose(0, Proposal((7, 8, 9)))
    assert verified(it.propose(1, Proposal((5, 6)))) == Proposal((5, 6))
    assert [draft.failures for draft in it.state.drafts.views] == [1, 0]


# ---- where the target decides ----------------------------------------------------------------------


def test_a_late_draft_is_left_out_where_the_target_decides() -> None:
    it = Several()
    it.propose(1, Proposal((8, 9)))
    assert verified(it.late()) == Proposal((8, 9))
    assert [draft.failures for draft in it.state.drafts.views] == [1, 0]
    assert it.propose(0, Proposal((7, 8))) == [], "too late"
    assert list(rounds(it.judge(Proposal((8, 9)), 8, 1))) == [1], "the late one is paused"


def test_all_drafts_may_be_late() -> None:
    it = Several()
    assert verified(it.late()) == Proposal()
    assert rounds(it.judge(Proposal(), 5)) == {}


def test_a_paused_draft_comes_back() -> None:
    it = Several()
    it.propose(1, Proposal())
    it.late()
    asked: list[list[int]] = []
    while len(asked) < 3:
        actions = it.judge(it.state.present.proposal, 5)
        asked.append(list(rounds(actions)))
        for number in asked[-1]:
            it.propose(number, Proposal())
    assert asked == [[1], [0, 1], [0, 1]]


# ---- where the target judges by q ------------------------------------------------------------------


def drawn(*token_ids: int) -> Proposal:
    return Proposal(token_ids, (), (Q,) * len(token_ids))


@pytest.mark.parametrize("tree", [CHAIN, TreeShape(2, 8)])
def test_a_slow_draft_is_waited_for_where_tokens_are_drawn(tree: TreeShape) -> None:
    it = Several(mode=AcceptanceMode.REJECTION, tree=tree)
    first = rounds(it.asked)
    it.propose(1, drawn(8, 9))
    for _ in range(5):
        again = rounds(it.late())
        assert again == {0: replace(first[0], committed_tail=())}
        assert it.phase is Phase.DRAFTING
    assert it.state.drafts[0].failures == 0
    assert verified(it.propose(0, drawn(7, 8))) == merged([drawn(7, 8), drawn(8, 9)])


def test_a_slow_tree_of_a_single_draft_is_waited_for() -> None:
    it = Several(1, mode=AcceptanceMode.REJECTION, tree=TreeShape(2, 8))
    assert list(rounds(it.late())) == [0]
    assert it.phase is Phase.DRAFTING


def test_only_its_loss_ends_the_wait_for_a_slow_draft() -> None:
    it = Several(mode=AcceptanceMode.REJECTION)
    it.propose(1, drawn(8, 9))
    it.late()
    assert verified(it(DraftLost(0))) == drawn(8, 9)


def test_no_draw_is_dropped_when_its_drafter_is_lost() -> None:
    it = Several(mode=AcceptanceMode.REJECTION)
    it.propose(0, drawn(7, 7))
    it(DraftLost(0))
    assert verified(it.propose(1, drawn(7, 8))) == merged([drawn(7, 7), drawn(7, 8)])


# ---- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.REJECTION])
def test_a_dead_draft_costs_its_branch(mode: AcceptanceMode) -> None:
    it = Several(3, mode=mode)
    it.propose(0, Proposal((7,)))
    assert it(DraftLost(1)) == []
    assert verified(it.propose(2, Proposal((8,)))) == Proposal((7, 8), (-1, -1))
    asked = rounds(it.judge(it.state.present.proposal, 7, 1))
    assert list(asked) == [0, 2]


def test_a_returning_draft_is_opened_from_the_ledger() -> None:
    it = Several()
    it(DraftLost(1))
    it.propose(0, Proposal((7,)))
    it(DraftReady(1))
    actions = it.judge(Proposal((7,)), 7, 1)
    (opening,) = [a for a in actions if isinstance(a, ToDraft) and isinstance(a.command, OpenSequence)]
    assert (opening.draft, opening.command.token_ids) == (1, (*PROMPT, 4, 7, 1))
    assert opening.command.epoch > max(it.state.drafts[0].epoch, 2)
    assert list(rounds(actions)) == [0, 1]


def test_a_failing_draft_is_closed_and_paused_alone() -> None:
    it = Several()
    (closing,) = it.fail(0, InternalError("broken"))
    assert isinstance(closing, ToDraft)
    assert (closing.draft, type(closing.command)) == (0, CloseSequence)
    assert verified(it.propose(1, Proposal((8,)))) == Proposal((8,))
    assert [draft.failures for draft in it.state.drafts.views] == [1, 0]


def test_a_draft_that_lost_the_sequence_is_asked_again_alone() -> None:
    it = Several()
    it.propose(0, Proposal((7,)))
    actions = it.fail(1, NotFoundError("gone"))
    assert [(a.draft, type(a.command)) for a in actions] == [(1, OpenSequence), (1, DraftRound)]  # type: ignore[union-attr]
    assert verified(it.fail(1, NotFoundError("gone"))) == Proposal((7,)), "once"


def test_a_failure_of_an_answered_round_does_no_harm() -> None:
    it = Several()
    it.propose(0, Proposal((7,)))
    it.fail(0, NotFoundError("gone"))
    assert verified(it.propose(1, Proposal((8,)))) == Proposal((7, 8), (-1, -1))
    actions = it.judge(it.state.present.proposal, 5)
    assert [a.draft for a in actions if isinstance(a, ToDraft) and isinstance(a.command, OpenSequence)] == [0]


def test_a_leaving_draft_is_closed_and_its_place_taken() -> None:
    it = Several()
    (closing,) = it(DraftLeft(0))
    assert isinstance(closing, ToDraft)
    assert isinstance(closing.command, CloseSequence)
    it(DraftReady(0))
    verified(it.propose(1, Proposal()))
    actions = it.judge(Proposal(), 5)
    assert list(rounds(actions)) == [0, 1]


def test_answers_to_another_epoch_are_ignored() -> None:
    it = Several()
    state = it.state
    old = DraftProposal("s", state.drafts[1].epoch, state.round, len(state.ledger), Proposal((9,)), 0)
    assert it(FromDraft(old, 0)) == [], "the other draft's epoch"
    assert it.phase is Phase.DRAFTING


def test_a_refused_merged_proposal_pauses_all_who_made_it() -> None:
    it = Several(3)
    it.propose(0, Proposal((7,)))
    it.propose(1, Proposal())
    it.propose(2, Proposal((8,)))
    state = it.state
    refusal = SequenceFailed("s", state.target.epoch, state.round, InvalidArgumentError("proposal", "no"))
    assert verified(it(FromTarget(refusal))) == Proposal()
    assert [draft.failures for draft in state.drafts.views] == [1, 0, 1]


def test_an_accepted_proposal_clears_its_drafters_failures() -> None:
    it = Several()
    for draft in it.state.drafts.views:
        draft.failures = 3
    it.propose(0, Proposal((7,)))
    it.judge(verified(it.propose(1, Proposal())), 5)
    assert [draft.failures for draft in it.state.drafts.views] == [0, 3]


# ---- ahead -----------------------------------------------------------------------------------------


def foresee(it: Several, draft: int, outcome: Outcome, proposal: Proposal) -> list[Action]:
    state = it.state
    place = state.drafts[draft].epoch, state.round, len(state.ledger)
    return it(FromDraft(Continuations("s", *place, {outcome: proposal}), draft))


def test_nothing_is_drafted_ahead_of_several() -> None:
    """A draft foresees outcomes of its own proposal, not of the merged one."""
    it = Several()
    it.propose(0, Proposal((7,)))
    it.propose(1, Proposal((8,)))
    assert foresee(it, 0, Outcome(1, 5), Proposal((6, 6))) == []


def test_the_only_draft_left_drafts_ahead() -> None:
    it = Several()
    it(DraftLost(0))
    it.propose(1, Proposal((8,)))
    it.judge(Proposal((8,)), 5)
    asked = rounds(it.asked)
    assert asked[1].no_lookahead
    it.propose(1, Proposal((8,)))
    assert foresee(it, 0, Outcome(1, 5), Proposal((6, 6))) == []
    assert len(foresee(it, 1, Outcome(1, 5), Proposal((6, 6)))) == 1
    actions = it.judge(Proposal((8,)), 8, 5)
    (follow,) = rounds(actions).items()
    assert follow[0] == 1
    assert (follow[1].proposal_known, follow[1].no_lookahead) == (True, False)
    assert verified(actions) == Proposal((6, 6))


def test_the_end_closes_all_drafts() -> None:
    it = Several(3)
    actions = it(Signal.CANCEL)
    closed = [a.draft for a in actions if isinstance(a, ToDraft) and isinstance(a.command, CloseSequence)]
    assert closed == [0, 1, 2]
    assert not any(isinstance(a, Emit) for a in actions)
