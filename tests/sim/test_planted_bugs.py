"""The simulation catches planted bugs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test as run_machine

from coordinator.proposers.remote_draft import RemoteDraft
from coordinator.round.machine import RoundMachine
from coordinator.round.next_round import NextRound
from coordinator.round.state import RoundState
from coordinator.round.steps import Steps
from coordinator.scheduling.block_waiters import Blocks
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit, Ledger
from coordinator.sequence.messages import Action, Emit, Fail
from coordinator.sequence.worker_view import WorkerView
from draft_worker.engine import DraftEngine
from paceline.core.errors import InternalError, ResourceExhaustedError, StaleEpochError
from paceline.core.messages import (
    CloseSequence,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import Outcome, Proposal, TokenOrigin, Verdict
from paceline.decoding.rows.bad_words import WordTable
from paceline.engine.scheduling import preemption
from paceline.engine.scheduling.engine_thread import EngineThread
from paceline.engine.scheduling.passes import Job
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.engine.scheduling.session import Disposition, Session
from paceline.kv import prefix
from target_worker import rounds
from target_worker.engine import TargetEngine
from tests.property.workers.test_draft_engine import SETTINGS as DRAFTER_SETTINGS
from tests.property.workers.test_draft_engine import DraftEngineMachine
from tests.property.workers.test_target_engine import SETTINGS as TARGET_SETTINGS
from tests.property.workers.test_target_engine import TargetMachine
from tests.sim.scenarios import check_equal, crowded_world, foreseeing_world, random_world
from tests.sim.world import SimulationError, World

FAULTS: tuple[type[BaseException], ...] = (AssertionError, ValueError, StopIteration, IndexError, KeyError)


MISTAKES = (TypeError, AttributeError, NameError)
"""What a planted bug raises that no longer fits the code: it shows nothing of the harness."""


class NoMistakes(logging.Handler):
    """Lets out what the code under test would catch and log, and fail a sequence for."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], MISTAKES):
            raise record.exc_info[1]


def simulation_catches(seeds: range = range(60), make_world: Callable[[int], World] = random_world) -> str:
    """What the first failing seed says."""
    root, no_mistakes = logging.getLogger(), NoMistakes()
    root.addHandler(no_mistakes)
    try:
        for seed in seeds:
            world = make_world(seed)
            try:
                world.run()
                for client in world.clients:
                    check_equal(client)
            except SimulationError as error:
                caught = str(error).partition("\n")[0]
                assert not caught.startswith(tuple(kind.__name__ for kind in MISTAKES)), caught
                print(caught)
                return caught
    finally:
        root.removeHandler(no_mistakes)
    pytest.fail(f"no simulation of {seeds} noticed the planted bug")


def machine_catches(machine: type, base: settings) -> None:
    """A stateful test fails; no time is spent on a small example."""
    quick = settings(base, report_multiple_bugs=False, phases=[HypothesisPhase.generate])
    with pytest.raises(FAULTS):
        run_machine(machine, settings=quick)


# ---- the workers' caches ---------------------------------------------------------------------------


def settle_off_by(entries: int) -> Callable[..., Verdict]:
    def settle(self: TargetEngine, r: Any, outcome: Outcome, logprobs: Any) -> Verdict:
        held, command, (num_accepted, next_token, _) = r.job.held, r.command, outcome
        tokens = (*command.proposal.token_ids[:num_accepted], next_token)
        held.session.tokens.extend(tokens)
        right = command.base_length + num_accepted
        held.cut_to(min(right + entries, held.table.length))
        # The lie that only a look into the cache discovers.
        verdict = Verdict(num_accepted, tokens, right, r.job.timings(), logprobs)
        held.session.finish(verdict)
        return verdict

    return settle


@pytest.mark.planted
@pytest.mark.parametrize("entries", [1, -1], ids=["too few", "too many"])
def test_catches_a_target_truncating_wrongly(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(TargetEngine, "_settle", settle_off_by(entries))
    assert "invariant 1" in simulation_catches()
    machine_catches(TargetMachine, TARGET_SETTINGS)


@pytest.mark.planted
def test_catches_a_target_keeping_rejected_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollback by position without comparing tokens: the entries of rejected drafts stay in use."""
    monkeypatch.setattr(Session, "agreed_length", lambda self: min(len(self.cached), len(self.tokens) - 1))
    monkeypatch.setattr(TargetEngine, "_settle", settle_off_by(1))
    assert "invariant" in simulation_catches()


@pytest.mark.planted
def test_catches_a_draft_missing_the_last_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full acceptance it feeds only the bonus, as if the last draft token had an entry."""
    real = DraftEngine._begin

    def begin(self: DraftEngine, command: DraftRound, arrived: float) -> Any:
        events = real(self, command, arrived)
        r = self._rounds.get(command.sequence_id)
        if r is not None and r.job.held.table.length and len(r.job.feed) == 2:
            del r.job.feed[0]
        return events

    monkeypatch.setattr(DraftEngine, "_begin", begin)
    machine_catches(DraftEngineMachine, DRAFTER_SETTINGS)


@pytest.mark.planted
def test_catches_a_draft_keeping_rejected_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "agreed_length", lambda self: min(len(self.cached), len(self.tokens) - 1))
    machine_catches(DraftEngineMachine, DRAFTER_SETTINGS)


# ---- rounds that begin ahead of the verdict --------------------------------------------------------


@pytest.mark.planted
def test_catches_going_on_with_another_outcomes_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TargetEngine._keep_next_proposals

    def keep(self: TargetEngine, command: VerifyAhead) -> None:
        shuffled = dict(zip(command.proposals, reversed(command.proposals.values()), strict=True))
        real(self, replace(command, proposals=shuffled))

    monkeypatch.setattr(TargetEngine, "_keep_next_proposals", keep)
    assert "does not fit its round" in simulation_catches(make_world=foreseeing_world)


@pytest.mark.planted
def test_catches_going_on_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TargetEngine._begin

    def begin(self: TargetEngine, command: VerifyRound, arrived: float) -> Any:
        events = real(self, command, arrived)
        if command.sequence_id in self._rounds:
            self._rounds[command.sequence_id].plain_otherwise = True
        return events

    monkeypatch.setattr(TargetEngine, "_begin", begin)
    assert "does not fit its round" in simulation_catches()


@pytest.mark.planted
def test_catches_a_begun_round_with_the_last_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NextRound.offer

    def offer(self: NextRound, proposals: Mapping[Outcome, Proposal]) -> None:
        real(self, proposals)
        self._first_offers.update({outcome: p.num_draft_tokens for outcome, p in proposals.items()})

    monkeypatch.setattr(NextRound, "offer", offer)
    caught = simulation_catches(make_world=foreseeing_world)
    # The target has not begun it when it is asked, or has judged it already.
    assert "requested before with other content" in caught or "does not fit its round" in caught


@pytest.mark.planted
def test_catches_drafting_in_a_plain_round_begun_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NextRound.follows

    def follows(self: NextRound, verdict: Verdict) -> Proposal | None:
        return None if verdict.went_on_with is None else real(self, verdict)

    monkeypatch.setattr(NextRound, "follows", follows)
    assert "requested before with other content" in simulation_catches(make_world=random_world)


@pytest.mark.planted
def test_catches_a_target_forgetting_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rounds.after

    def after(command: VerifyRound, accepted: int, proposal: Proposal) -> VerifyRound:
        return real(command, accepted if proposal.num_draft_tokens else 0, proposal)

    monkeypatch.setattr(rounds, "after", after)
    # In earlier seeds a repeated round meets the wrong ledger before the invariant is looked at.
    assert "invariant 1" in simulation_catches(range(10, 60))


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.planted
def test_catches_publishing_a_speculative_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fed(self: HeldSequence[Any], token_ids: list[int]) -> None:
        self.session.cached.extend(token_ids)
        self.state.publish(self.session.cached)

    monkeypatch.setattr(HeldSequence, "fed", fed)
    assert "no part of any ledger" in simulation_catches(make_world=crowded_world)


@pytest.mark.planted
def test_catches_an_ignored_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "first_key", lambda salt: b"")
    assert "of its salt" in simulation_catches(make_world=crowded_world)


@pytest.mark.planted
def test_catches_cached_entries_used_for_wanted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scored prompt needs the logits of every row, the cached ones too."""

    def reuse(self: Job) -> None:
        if self.begins:
            found = self.held.reuse(len(self.feed) - self.rows)
            self.reused += found
            self.offset += found

    monkeypatch.setattr(Job, "reuse", reuse)
    assert "does not fit its round" in simulation_catches(make_world=crowded_world)


@pytest.mark.planted
def test_catches_failing_a_preempted_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RoundState, refused_round: int, error: ResourceExhaustedError) -> list[Action]:
        return [*self.close(), Fail(error)]

    monkeypatch.setattr(RoundState, "wait_for_blocks", fail)
    assert "invariant 6" in simulation_catches(make_world=crowded_world)


@pytest.mark.planted
def test_catches_a_preempted_sequence_keeping_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given away, and it goes on as if they were there."""
    real = preemption._youngest

    def youngest(holders: list[HeldSequence[Any]], age: int) -> HeldSequence[Any] | None:
        held = real(holders, age)
        if held is not None:
            held.table.free()
            monkeypatch.setattr(HeldSequence, "cut_to", lambda self, length: self.table.truncate_to(length))
        return held

    monkeypatch.setattr(preemption, "_youngest", youngest)
    assert "does not hold its own token" in simulation_catches(make_world=crowded_world)


# ---- the ledger ------------------------------------------------------------------------------------


@pytest.mark.planted
def test_catches_a_commit_after_the_emit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.commit
    late: dict[int, Any] = {}

    def commit(self: Ledger, tokens: Sequence[tuple[int, TokenOrigin]], logprobs: Any) -> Commit:
        if id(self) in late:
            real(self, late.pop(id(self)))
        twin = copy.deepcopy(self)
        late[id(self)] = list(tokens)
        return real(twin, tokens, logprobs)

    monkeypatch.setattr(Ledger, "commit", commit)
    assert "invariant 2" in simulation_catches()


@pytest.mark.planted
def test_catches_a_commit_without_a_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: Ledger, tokens: Sequence[tuple[int, TokenOrigin]], logprobs: Any) -> Commit:
        index = self.num_generated
        text = ""
        for token_id, _ in tokens:
            self.token_ids.append(token_id)
            text += self._take(token_id) if not self.ended else ""
        ids, origins = zip(*tokens, strict=True)
        text += self._flush() if self.ended else ""
        return Commit(index, ids, origins, text, self.finish, logprobs=tuple(logprobs))

    monkeypatch.setattr(Ledger, "commit", commit)
    assert "invariant 4" in simulation_catches()


@pytest.mark.planted
def test_catches_half_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.commit
    monkeypatch.setattr(Ledger, "commit", lambda self, tokens, logprobs: real(self, tokens[:1], logprobs))
    assert "invariant 3" in simulation_catches()


@pytest.mark.planted
def test_catches_unclipped_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.commit

    def commit(self: Ledger, tokens: Sequence[tuple[int, TokenOrigin]], logprobs: Any) -> Commit:
        return replace(real(self, tokens), logprobs=tuple(logprobs))

    monkeypatch.setattr(Ledger, "commit", commit)
    assert "log-probabilities of" in simulation_catches()


@pytest.mark.planted
def test_catches_a_prompt_reported_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is lost while it scores a prompt begins again, and so would the client's list."""

    def report(self: Ledger, start: int, logprobs: Any) -> Commit:
        self._prompt_logprobs_due = self.prompt_length - start - len(logprobs)
        return Commit(0, (), (), "", prompt_logprobs=tuple(logprobs))

    monkeypatch.setattr(Ledger, "report_prompt", report)
    assert "log-probabilities of" in simulation_catches()


# ---- masks -----------------------------------------------------------------------------------------


@pytest.mark.planted
def test_catches_bad_words_ignoring_the_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their context must grow along the proposal."""
    real = WordTable.completed_by

    def completed(self: WordTable, ledger: Any, drafts: Any, depths: Any, paths: Any) -> Any:
        return real(self, ledger, drafts, depths * 0, paths)

    monkeypatch.setattr(WordTable, "completed_by", completed)
    assert "invariant 4" in simulation_catches()


@pytest.mark.planted
def test_catches_a_verdict_committed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Steps.on_verdict

    def twice(self: Steps, event: RoundVerdict, now: float) -> list[Action]:
        ledger = self.state.ledger
        before = len(ledger)
        actions = real(self, event, now)
        if len(ledger) > before and not ledger.ended and ledger.remaining > 9:
            tokens = [(token, TokenOrigin.TARGET) for token in event.verdict.token_ids]
            actions.insert(1, Emit(ledger.commit(tokens)))
        return actions

    monkeypatch.setattr(Steps, "on_verdict", twice)
    assert "invariant" in simulation_catches()


# ---- stale messages --------------------------------------------------------------------------------


@pytest.mark.planted
@pytest.mark.parametrize("believes", [False, True])
def test_catches_accepting_a_stale_verdict(monkeypatch: pytest.MonkeyPatch, believes: bool) -> None:
    """`believes`: also without the check that a verdict fits its round."""
    monkeypatch.setattr(WorkerView, "answers", lambda self, event, round_number: True)
    if believes:
        monkeypatch.setattr(RoundState, "accepts", lambda self, verdict: True)
    assert "invariant" in simulation_catches()


@pytest.mark.planted
def test_catches_a_session_with_relative_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(
        self: Session[Any], epoch: int, round_number: int, base: int, tail: Sequence[int], question: Any
    ) -> Disposition:
        if epoch != self.epoch or round_number < self.round:
            raise StaleEpochError("old")
        if round_number == self.round:
            return Disposition.IN_PROGRESS if self.answer is None else Disposition.REPEAT
        self.tokens.extend(tail)
        self.round, self.question, self.answer = round_number, question, None
        return Disposition.COMPUTE

    monkeypatch.setattr(Session, "begin", begin)
    machine_catches(TargetMachine, TARGET_SETTINGS)
    machine_catches(DraftEngineMachine, DRAFTER_SETTINGS)


@pytest.mark.planted
@pytest.mark.parametrize("what", ["rounds", "openings", "closings"])
def test_catches_an_unfenced_epoch(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "rounds":
        real_begin = Session.begin
        monkeypatch.setattr(Session, "begin", lambda self, epoch, *rest: real_begin(self, self.epoch, *rest))
    elif what == "openings":

        def unfenced(self: HeldSequences[Any], command: OpenSequence, _grammar: object = None) -> None:
            self.drop(command.sequence_id)
            session: Session[Any] = Session(
                command.sequence_id, command.epoch, command.params, list(command.token_ids)
            )
            self._held[command.sequence_id] = HeldSequence(session, self.states.new(""))
            self._leases.renew(command.sequence_id)

        monkeypatch.setattr(HeldSequences, "open", unfenced)
    else:

        def close(self: HeldSequences[Any], command: CloseSequence) -> bool:
            self.drop(command.sequence_id)
            return True

        monkeypatch.setattr(HeldSequences, "close", close)
    machine_catches(TargetMachine, TARGET_SETTINGS)


# ---- faults that were found in the code by this harness --------------------------------------------


@pytest.mark.planted
def test_catches_a_failed_draft_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: RoundState, draft: RemoteDraft) -> list[Action]:
        draft.open = False
        return []

    monkeypatch.setattr(RoundState, "close_draft", forget)
    assert "invariant 5" in simulation_catches()


@pytest.mark.planted
def test_catches_failing_a_sequence_that_has_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences run out of blocks at once and are closed; then their blocks are free."""

    def refused(self: Blocks, running: Running, _error: ResourceExhaustedError, _now: float) -> bool:
        running.was_blocked = True
        others = (r for r in self._sequences.values() if r is not running and r.admitted)
        waits = any(r.state.holds_target for r in others)
        if waits:
            self._blocked.append(running)
        return waits

    monkeypatch.setattr(Blocks, "refused", refused)
    assert "invariant 6" in simulation_catches(range(40, 240), crowded_world)


@pytest.mark.planted
def test_catches_a_target_loss_failing_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RoundMachine,
        "_resume_on_target",
        lambda self, now: [*self.state.close(), Fail(InternalError("lost"))],
    )
    assert "invariant 6" in simulation_catches()


@pytest.mark.planted
def test_catches_a_stream_end_dropping_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineThread, "leave", lambda self, route: None)
    assert "invariant 5" in simulation_catches(range(300))
