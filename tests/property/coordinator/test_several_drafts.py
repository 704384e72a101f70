"""The rounds of a sequence with several drafts, which answer, fail, vanish and return in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.sequence.messages import (
    Action,
    DraftLeft,
    DraftLost,
    DraftReady,
    Fail,
    Phase,
    ToDraft,
    ToTarget,
)
from paceline.core.errors import FailedPreconditionError, InternalError, NotFoundError, ResourceExhaustedError
from paceline.core.messages import CloseSequence, DraftRound, OpenSequence, VerifyRound
from paceline.core.types import CHAIN, AcceptanceMode, Proposal, SparseDistribution, TreeShape
from tests.unit.coordinator.test_several_drafts import Several

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
Q = SparseDistribution(uniform_over=20)
TOKENS = 3
"""Few, so that proposals often agree."""
ERRORS = [
    NotFoundError("gone"),
    InternalError("broken"),
    ResourceExhaustedError("full", 1.0),
    FailedPreconditionError("behind", known_length=2),
]


class Watched:
    """A sequence whose commands are followed as its draft workers see them."""

    def __init__(self, data: st.DataObject, mode: AcceptanceMode) -> None:
        self.data, self.mode = data, mode
        number = self.draw(1, 3)
        tree = data.draw(st.sampled_from([CHAIN, TreeShape(2, 6), TreeShape(3, 12)]))
        self.max_nodes = self.draw(4, 16)
        self.it = Several(number, mode=mode, tree=tree, max_nodes=self.max_nodes, max_tokens=40)
        self.ready = set(range(number))
        self.opened: dict[int, int] = {}
        """Epoch of each draft's last opening."""
        self.epochs: set[int] = set()
        self.asked: dict[int, DraftRound] = {}
        """Who owes an answer, and to what."""
        self.answers: dict[int, Proposal] = {}
        """Of this round."""
        self.take([*self.it.opened, *self.it.asked])

    def draw(self, smallest: int, most: int) -> int:
        return self.data.draw(st.integers(smallest, most))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            assert not isinstance(action, Fail)
            if isinstance(action, ToTarget) and isinstance(action.command, VerifyRound):
                self.verified(action.command.proposal)
            if isinstance(action, ToDraft):
                self.sent(action.draft, action.command)
        state = self.it.state
        awaited = {draft.index for draft in state.drafts.awaited}
        assert bool(awaited) == (state.phase is Phase.DRAFTING)
        assert awaited <= self.ready & set(self.asked)

    def sent(self, draft: int, command: Any) -> None:
        assert draft in self.ready
        match command:
            case OpenSequence():
                assert command.epoch not in self.epochs
                assert command.params.draft_index == draft
                self.opened[draft] = command.epoch
                self.epochs.add(command.epoch)
            case DraftRound():
                assert command.epoch == self.opened[draft]
                assert command.base_length == len(self.it.state.ledger)
                if not self.asked:
                    self.answers.clear()
                self.asked[draft] = command
            case CloseSequence():
                self.opened.pop(draft)

    def verified(self, proposal: Proposal) -> None:
        """What was drawn is all there, each with its q, in the order of the drafts."""
        assert proposal.depth <= 3
        if len(self.answers) > 1:
            assert proposal.num_draft_tokens <= self.max_nodes
        drawn = [token for _, each in sorted(self.answers.items()) for token in each.token_ids]
        nodes = proposal.tries or range(proposal.num_draft_tokens)
        if self.mode is AcceptanceMode.REJECTION:
            assert [proposal.token_ids[node] for node in nodes] == drawn
            assert len(proposal.distributions) == len(drawn)
        else:
            assert set(proposal.token_ids) == set(drawn)
        self.asked.clear()
        self.answers.clear()

    def step(self) -> None:
        it = self.it
        kinds = ["answer"] * 4 + ["late", "lose", "return", "fail"]
        kind = self.data.draw(st.sampled_from(kinds)) if it.phase is Phase.DRAFTING else "judge"
        if it.phase is not Phase.DRAFTING and self.draw(0, 3) == 0:
            kind = self.data.draw(st.sampled_from(["lose", "return", "fail"]))
        number = self.draw(0, len(it.state.drafts.views) - 1)
        match kind:
            case "answer":
                self.answer(self.data.draw(st.sampled_from(sorted(self.asked))))
            case "late":
                self.late()
            case "lose" if number in self.ready:
                event = self.data.draw(st.sampled_from([DraftLost(number), DraftLeft(number)]))
                self.take_loss(number, event)
            case "return" if number not in self.ready:
                self.ready.add(number)
                self.take(it(DraftReady(number)))
            case "fail" if number in self.opened:
                self.fail(number, self.data.draw(st.sampled_from(ERRORS)))
            case "judge":
                self.judge()

    def answer(self, number: int) -> None:
        command = self.asked.pop(number)
        tokens = tuple(self.draw(0, TOKENS - 1) for _ in range(self.draw(0, command.num_draft_tokens)))
        if not command.shape.is_chain:
            tokens = tokens[: command.shape.nodes]
        q = (Q,) * len(tokens) if self.mode is AcceptanceMode.REJECTION else ()
        proposal = self.answers[number] = Proposal(tokens, (), q)
        self.take(self.it.propose(number, proposal))

    def late(self) -> None:
        """Where tokens are drawn by several, or as a tree, nobody is left out."""
        waits = self.mode is AcceptanceMode.REJECTION and (
            len(self.it.state.drafts.asked) > 1
            or any(not command.shape.is_chain for command in self.asked.values())
        )
        before = set(self.asked)
        if not waits:
            self.asked.clear()
        self.take(self.it.late())
        assert not waits or set(self.asked) == before

    def take_loss(self, number: int, event: DraftLost | DraftLeft) -> None:
        self.asked.pop(number, None)
        if isinstance(event, DraftLost):
            self.ready.discard(number)
            self.opened.pop(number, None)
            self.take(self.it(event))
            return
        actions = self.it(event)
        mine = [a for a in actions if isinstance(a, ToDraft) and a.draft == number]
        assert all(isinstance(action.command, CloseSequence) for action in mine)
        self.ready.discard(number)
        self.opened.pop(number, None)
        self.take([action for action in actions if action not in mine])

    def fail(self, number: int, error: Any) -> None:
        owed = self.asked.pop(number, None)
        actions = self.it.fail(number, error)
        if isinstance(error, NotFoundError):
            self.opened.pop(number)
        again = [a for a in actions if isinstance(a, ToDraft) and isinstance(a.command, DraftRound)]
        assert owed is not None or not again
        self.take(actions)

    def judge(self) -> None:
        """A path of random length along what was sent, and a token behind it."""
        proposal = self.it.state.present.proposal
        path: list[int] = []
        node: int | None = None
        for _ in range(self.draw(0, proposal.depth)):
            if proposal.parents:
                children = list(proposal.children_of(node))
                if not children:
                    break
                node = self.data.draw(st.sampled_from(children))
            else:
                node = len(path)
            path.append(proposal.token_ids[node])
        before = len(self.it.generated)
        self.asked.clear()
        self.take(self.it.judge(proposal, *path, self.draw(0, TOKENS - 1)))
        assert self.it.generated[before : before + len(path)] == path[: 40 - before]


@SETTINGS
@given(st.data(), st.sampled_from([AcceptanceMode.COUPLED, AcceptanceMode.REJECTION]))
def test_every_order_of_answers_and_failures_keeps_all_draws(
    data: st.DataObject, mode: AcceptanceMode
) -> None:
    of = Watched(data, mode)
    for _ in range(data.draw(st.integers(1, 40))):
        if of.it.phase is Phase.DONE:
            return
        of.step()
