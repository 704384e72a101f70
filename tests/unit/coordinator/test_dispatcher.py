"""The dispatcher: assignment of workers, waits, losses and emitted parts. Links are fakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

import coordinator.scheduling.dispatcher as dispatcher_module
from coordinator.round.machine import RoundMachine
from coordinator.round.state import MAX_LOSSES, RoundState
from coordinator.scheduling.block_waiters import GRACE_SECONDS
from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.scheduling.quarantine import SUSPECT
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit, Ledger
from coordinator.sequence.messages import Deadlines, Phase, Signal
from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import FixedLength
from paceline.core import limits
from paceline.core.clock import ManualClock
from paceline.core.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    ResourceExhaustedError,
    UnavailableError,
)
from paceline.core.messages import (
    CloseSequence,
    DraftProposal,
    DraftRound,
    OpenSequence,
    PromptLogprobs,
    RoundVerdict,
    SequenceFailed,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams, Verdict
from tests.sim.reference import LetterDetokenizer

FULL = ResourceExhaustedError("no blocks")


class FakeLink:
    """Keeps what is sent."""

    def __init__(self, *, ready: bool = True, max_model_len: int = 50) -> None:
        self.ready = ready
        self.load = 0
        self.known = SimpleNamespace(max_model_len=max_model_len)
        self.sent: list[Any] = []
        self.flushed = 0
        self.hung_up = 0
        self.address = "fake:1"

    def send(self, command: Any) -> None:
        self.sent.append(command)

    def flush(self) -> None:
        self.flushed = len(self.sent)

    def hang_up(self) -> None:
        self.hung_up += 1


class Service:
    """A dispatcher with one target unless told otherwise."""

    def __init__(
        self, targets: int = 1, drafts: int = 0, max_running: int = 10, max_waiting: int = 10, **more: float
    ) -> None:
        self.clock = ManualClock()
        self.it = Dispatcher(max_running, max_waiting, self.clock, **more)
        self.targets = [FakeLink() for _ in range(targets)]
        self.drafts = [FakeLink() for _ in range(drafts)]
        self.it.targets = list(self.targets)  # type: ignore[arg-type]
        self.it.drafts = list(self.drafts)  # type: ignore[arg-type]
        self.count = 0

    def submit(self, k: int = 3, max_tokens: int = 20) -> Running:
        self.count += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=1)
        ledger = Ledger(
            [1, 2], sampling, detokenizer=LetterDetokenizer(), eos_token_ids=frozenset(), max_model_len=50
        )
        params = SequenceParams(sampling, AcceptanceMode.COUPLED, 2)
        deadlines = Deadlines(1.0, 10.0, 100.0)
        machine = RoundMachine(
            RoundState(
                f"s{self.count}",
                ledger,
                params,
                k,
                FixedLength(Controller(k), k),
                deadlines,
                20,
                50,
                deadline=100.0,
            )
        )
        return self.it.submit(machine)

    def answer(self, running: Running, *token_ids: int) -> None:
        assert running.target is not None
        self.it.link_events(running.target, [verdict_of(running, *token_ids)])

    def propose(self, running: Running, *, of_round: int = 0) -> None:
        """Three tokens, for the round in progress or an earlier one."""
        machine, draft = running.machine, running.draft
        assert draft is not None
        number, base = of_round or machine.state.round, len(machine.state.ledger)
        proposal = Proposal((7, 8, 9))
        event = DraftProposal(
            machine.state.sequence_id, machine.state.draft.epoch, number, base, proposal, base + 2
        )
        self.it.link_events(draft, [event])

    def draft_round(self, *runnings: Running) -> None:
        """Each goes on until it waits for its draft; its target answers at once."""
        for running in runnings:
            while running.state.phase is Phase.VERIFYING:
                self.answer(running, 5)
            assert running.state.phase is Phase.DRAFTING

    def deadline(self, *runnings: Running) -> None:
        """Their draft lets one pass: a second."""
        self.draft_round(*runnings)
        self.clock.now += 1.0
        self.sweep()

    def failure(self, running: Running, error: PacelineError) -> SequenceFailed:
        machine = running.machine
        return SequenceFailed(
            machine.state.sequence_id, machine.state.target.epoch, machine.state.round, error
        )

    def fail(self, *runnings: Running, error: PacelineError = FULL) -> None:
        """One frame in which all of them fail."""
        target = runnings[0].target
        assert target is not None
        self.it.link_events(target, [self.failure(running, error) for running in runnings])

    def lose(self, link: FakeLink) -> None:
        link.ready = False
        self.it.link_lost(link)  # type: ignore[arg-type]

    def start_over(self, link: FakeLink) -> None:
        """What a link does that is hung up, where the worker says at once what it is."""
        self.lose(link)
        link.ready = True
        self.it.link_ready(link)  # type: ignore[arg-type]

    def sweep(self) -> None:
        sweep = self.it.sweep()
        sweep.send(None)
        sweep.send(None)
        sweep.close()


def verdict_of(running: Running, *token_ids: int) -> RoundVerdict:
    """Of the round in progress."""
    machine = running.machine
    verdict = Verdict(len(token_ids) - 1, token_ids, len(machine.state.ledger) + len(token_ids) - 1)
    return RoundVerdict(machine.state.sequence_id, machine.state.target.epoch, machine.state.round, verdict)


@pytest.fixture(autouse=True)
def _sweeps_do_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "SWEEP_SECONDS", 0)


def parts(running: Running) -> list[Commit | PacelineError]:
    return [running.parts.get_nowait() for _ in range(running.parts.qsize())]


def read(service: Service, running: Running) -> Commit | PacelineError:
    try:
        service.it.next_part(running).send(None)
    except StopIteration as result:
        part: Commit | PacelineError = result.value
        return part
    raise AssertionError("there was nothing to read")


def types(link: FakeLink) -> list[type]:
    """Of the commands sent, but for "the next round is plain" (test_rounds_ahead.py has these)."""
    plain = [c for c in link.sent if isinstance(c, VerifyAhead) and c.plain_otherwise]
    return [type(command) for command in link.sent if command not in plain]


def test_a_sequence_gets_the_least_loaded_workers() -> None:
    service = Service(targets=3, drafts=2)
    service.targets[0].ready = False
    first, second, third = service.submit(), service.submit(), service.submit(k=0)
    assert [r.target for r in (first, second, third)] == [
        service.targets[1],
        service.targets[2],
        service.targets[1],
    ]
    assert [r.draft for r in (first, second, third)] == [service.drafts[0], service.drafts[1], None]
    assert [link.load for link in (*service.targets, *service.drafts)] == [0, 2, 1, 1, 1]


def test_the_draft_is_opened_in_the_first_round() -> None:
    service = Service(drafts=1)
    running = service.submit()
    assert types(service.targets[0]) == [OpenSequence, VerifyRound]
    assert types(service.drafts[0]) == [OpenSequence]
    service.answer(running, 5)
    assert types(service.drafts[0]) == [OpenSequence, DraftRound]


def test_commits_reach_the_client_and_the_end_frees_the_worker() -> None:
    service = Service()
    running = service.submit(max_tokens=2)
    service.answer(running, 5)
    service.answer(running, 6)
    first, last = parts(running)
    assert isinstance(first, Commit)
    assert isinstance(last, Commit)
    assert (first.index, first.finish, last.index) == (0, None, 1)
    assert last.finish is not None
    assert types(service.targets[0])[-1] is CloseSequence
    assert (service.it.running, service.it.waiting, service.targets[0].load) == (0, 0, 0)
    assert (service.it.finished, service.it.failed) == (1, 0)


def test_excess_requests_wait_and_then_are_refused() -> None:
    service = Service(max_running=2, max_waiting=1)
    first, _, third = service.submit(), service.submit(), service.submit()
    assert (service.it.running, service.it.waiting, third.admitted) == (2, 1, False)
    with pytest.raises(ResourceExhaustedError, match="waiting already"):
        service.submit()
    service.it.cancel(first)
    assert third.admitted
    assert third.machine.state.phase is Phase.VERIFYING
    assert service.it.waiting == 0


def test_more_sequences_than_the_capacity_are_invalid() -> None:
    """Retrying would not help."""
    service = Service(max_running=2, max_waiting=1)
    service.it.check_fits(3)
    with pytest.raises(InvalidArgumentError) as caught:
        service.it.check_fits(4)
    assert caught.value.field == "n"


def test_a_waiting_request_can_be_cancelled() -> None:
    service = Service(max_running=1, max_waiting=1)
    service.submit()
    second = service.submit()
    service.it.cancel(second)
    assert (service.it.running, service.it.waiting) == (1, 0)
    assert service.submit().admitted is False


def test_a_queued_request_has_no_recovery_deadline() -> None:
    """It waits behind a healthy target."""
    service = Service(max_running=1)
    first, second = service.submit(max_tokens=1), service.submit()
    service.clock.now = 99.0
    first.state.deadline = None
    service.clock.now = 500.0
    service.sweep()
    assert second.state.phase is Phase.NEW
    service.answer(first, 5)
    assert second.state.phase is Phase.VERIFYING
    service.sweep()
    assert parts(second) == []


def test_sweeping_applies_deadlines() -> None:
    service = Service()
    running = service.submit()
    service.clock.now = 9.9
    service.sweep()
    assert service.targets[0].hung_up == 0
    service.clock.now = 10.0
    service.sweep()
    assert service.targets[0].hung_up == 1
    service.lose(service.targets[0])
    assert running.state.phase is Phase.STALLED
    service.clock.now = 110.0
    service.sweep()
    (error,) = parts(running)
    assert isinstance(error, UnavailableError)
    assert service.it.failed == 1


def test_a_target_answering_others_stays_connected() -> None:
    """Only the late sequence moves, to another target with less to do."""
    for targets in (1, 2):
        service = Service(targets=targets)
        late, lively = service.submit(k=0), service.submit(k=0)
        lively.target = service.targets[0]  # type: ignore[assignment]
        service.targets[0].load, service.targets[-1].load = 2, 2 if targets == 1 else 0
        service.targets[0].sent.clear()
        for second in (3.0, 6.0, 9.0):
            service.clock.now = second
            service.answer(lively, 5)
        service.clock.now = 10.0
        service.sweep()
        assert [target.hung_up for target in service.targets] == [0] * targets
        assert late.target is service.targets[-1]
        assert (late.state.phase, late.machine.state.target.epoch) == (Phase.VERIFYING, targets)
        mine = [c for c in service.targets[0].sent if c.sequence_id == late.state.sequence_id]
        assert type(mine[0]) is (VerifyRound if targets == 1 else CloseSequence)
        assert sum(target.load for target in service.targets) == 2
        assert lively.machine.state.target.epoch == 1
        service.answer(late, 7)
        assert [commit.token_ids for commit in parts(late)] == [(7,)]  # type: ignore[union-attr]


def test_a_target_answering_nobody_is_disconnected() -> None:
    service = Service()
    late, other = service.submit(k=0), service.submit(k=0)
    service.clock.now = 4.9
    service.answer(other, 5)
    service.clock.now = 10.0
    service.sweep()
    assert service.targets[0].hung_up == 1
    assert late.state.phase is Phase.STALLED


def test_a_client_that_stops_reading_is_cut_unless_lost() -> None:
    """A held request has no reader and is not cut."""
    service = Service(unread_timeout=60.0)
    running = service.submit(k=0)
    running.behind_since, running.read, running.state.deadline = 0.0, False, None
    service.clock.now = 61.0
    service.sweep()
    assert not running.ended
    running.read = True
    service.sweep()
    assert isinstance(running.error, UnavailableError)


def test_a_target_reporting_a_prompt_stays_connected() -> None:
    """A long prompt's reports count as answers."""
    service = Service()
    reporting, waiting = service.submit(k=0), service.submit(k=0)
    service.clock.now = 9.9
    reporting.machine.state.deadline = 19.9
    report = PromptLogprobs(reporting.machine.state.sequence_id, 99, 1, 0, ())
    service.it.link_events(service.targets[0], [report])  # type: ignore[arg-type]
    service.clock.now = 10.0
    service.sweep()
    assert service.targets[0].hung_up == 0
    assert waiting.machine.state.phase is Phase.VERIFYING


def serve_until_all_end(service: Service, sequences: Sequence[Running], poison: Running) -> int:
    """Targets die whenever the round of one sequence is put to them, and else answer; how often they die."""
    deaths = 0
    while not all(running.ended for running in sequences):
        service.clock.now += 0.1
        busy = [r for r in sequences if not r.ended and r.state.phase is Phase.VERIFYING]
        assert busy, "somebody is always on"
        if poison in busy:
            deaths += 1
            assert deaths < 100
            service.start_over(cast(FakeLink, poison.target))
            assert all(r.state.losses <= SUSPECT for r in sequences if r is not poison and not r.ended)
        else:
            for running in busy:
                service.answer(running, 5)
    return deaths


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_round_that_kills_targets_ends_only_its_sequence(place: int, targets: int) -> None:
    """Also of those that shared its passes."""
    service = Service(targets=targets)
    sequences = [service.submit(k=0, max_tokens=6) for _ in range(5)]
    poison = sequences[place]
    assert serve_until_all_end(service, sequences, poison) == MAX_LOSSES
    for running in sequences:
        told = parts(running)
        if running is poison:
            assert isinstance(told[-1], InternalError)
        else:
            assert [part.token_ids for part in told] == [(5,)] * 6  # type: ignore[union-attr]
    assert service.it.failed == 1
    assert not service.it._suspects.waiting


def test_requests_arriving_beside_a_killer_are_served() -> None:
    service = Service()
    sequences = [service.submit(k=0, max_tokens=6) for _ in range(3)]
    poison = sequences[0]
    for _ in range(5):
        service.start_over(service.targets[0])
        sequences.append(service.submit(k=0, max_tokens=6))
    serve_until_all_end(service, sequences, poison)
    assert [running.error is None for running in sequences] == [False, *[True] * 7]


def suspected(service: Service, *runnings: Running) -> None:
    """Their target dies as often as makes suspects of them; the first is tried, the others wait."""
    for _ in range(SUSPECT):
        service.start_over(service.targets[0])
    phases = [running.state.phase for running in runnings]
    assert phases == [Phase.VERIFYING, *[Phase.STALLED] * (len(runnings) - 1)]


def test_a_suspect_awaiting_its_turn_has_no_recovery_deadline() -> None:
    """The turns before it may take longer than the recovery timeout."""
    service = Service()
    first, second = service.submit(k=0), service.submit(k=0)
    suspected(service, first, second)
    for now in range(50, 500, 50):
        service.clock.now, first.state.deadline = float(now), None
        service.sweep()
    assert second.state.phase is Phase.STALLED
    service.targets[0].ready = False
    service.clock.now += 101.0
    service.sweep()
    assert isinstance(second.error, UnavailableError), "without a target it does"


def test_a_suspect_goes_on_at_its_turn() -> None:
    service = Service()
    first, second = service.submit(k=0), service.submit(k=0)
    suspected(service, first, second)
    service.answer(first, 5)
    assert second.state.phase is Phase.VERIFYING
    assert first.state.losses == 0


def test_a_sequence_waiting_for_blocks_does_not_delay_suspects() -> None:
    """Its verdict may take as long as other sequences' answers."""
    service = Service()
    suspect = service.submit(k=0)
    service.start_over(service.targets[0])
    fitting, waiting = service.submit(k=0), service.submit(k=0)
    service.start_over(service.targets[0])
    service.fail(waiting)
    assert (waiting.machine.state.phase, waiting.machine.state.losses) == (Phase.WAITING, 1)
    service.answer(fitting, 5)
    service.sweep()
    assert suspect.machine.state.phase is Phase.VERIFYING


def test_a_verdict_clears_a_suspect_that_then_pauses() -> None:
    """Suspects must not wait for its client."""
    service = Service()
    paused, suspect = service.submit(k=0), service.submit(k=0)
    suspected(service, paused, suspect)
    service.it._handle(paused, Signal.CLIENT_BEHIND)
    service.answer(paused, 5)
    assert (paused.machine.state.phase, paused.machine.state.losses) == (Phase.PAUSED, 0)
    assert suspect.machine.state.phase is Phase.VERIFYING


def test_suspects_ending_on_their_turn_leave_nothing() -> None:
    """An ended sequence must not be assigned workers again."""
    service = Service(drafts=1, max_running=300, max_waiting=300)
    runnings = [service.submit(k=0) for _ in range(250)]
    service.start_over(service.targets[0])
    service.lose(service.targets[0])
    for running in runnings:
        running.state.target.losses = SUSPECT
    service.targets[0].ready, service.targets[0].known.max_model_len = True, 1
    service.it.link_ready(service.targets[0])  # type: ignore[arg-type]
    assert all(running.ended for running in runnings)
    assert [link.load for link in (*service.targets, *service.drafts)] == [0, 0]
    assert not service.it._suspects.waiting


def test_a_cancelled_suspect_is_forgotten() -> None:
    service = Service()
    first, second = service.submit(k=0), service.submit(k=0)
    for _ in range(SUSPECT):
        service.start_over(service.targets[0])
    service.it.cancel(second)
    assert not service.it._suspects.waiting
    service.it.cancel(first)
    assert service.targets[0].load == 0


def test_a_silent_drafts_sequences_move_to_another() -> None:
    """Otherwise each would return to it after some rounds and wait again."""
    service = Service(drafts=2)
    hung, sound = service.drafts
    one, other, two = (service.submit() for _ in range(3))
    assert [running.draft for running in (one, other, two)] == [hung, sound, hung]
    service.deadline(one, two)
    assert [draft.hung_up for draft in service.drafts] == [0, 0], "it may be reading a long prompt"
    service.draft_round(other)
    service.propose(other)
    service.deadline(one, two)
    assert [draft.hung_up for draft in service.drafts] == [1, 0]
    service.lose(hung)
    assert [running.draft for running in (one, other, two)] == [sound] * 3
    for running in (one, two):
        service.draft_round(running)
        service.propose(running)
        assert running.state.present.proposal.num_draft_tokens == 3
        service.answer(running, 7, 8, 9, 5)


def test_a_draft_late_for_one_sequence_stays_connected() -> None:
    service = Service(drafts=2)
    draft = service.drafts[0]
    late, _, lively = (service.submit(max_tokens=40) for _ in range(3))
    assert late.draft is lively.draft is draft
    for _ in range(4):
        service.draft_round(late, lively)
        service.clock.now += 0.1
        service.propose(lively)
        service.answer(lively, 7, 8, 9, 5)
        service.clock.now += 0.9
        service.sweep()
    assert (draft.hung_up, late.draft) == (0, draft)
    assert late.state.phase is Phase.VERIFYING


@pytest.mark.parametrize("says", ["its proposal, too late", "that it lacks the sequence"])
def test_a_draft_that_answers_anything_is_not_hanging(says: str) -> None:
    """It is slow: each round of its only sequence is answered after the deadline."""
    service = Service(drafts=1)
    running = service.submit(max_tokens=40)
    for _ in range(4):
        service.draft_round(running)
        asked = running.state.round
        service.deadline(running)
        if says == "its proposal, too late":
            service.propose(running, of_round=asked)
        else:
            failure = service.failure(running, NotFoundError("no such sequence"))
            service.it.link_events(service.drafts[0], [failure])  # type: ignore[arg-type]
    assert service.drafts[0].hung_up == 0


def test_sequences_share_one_silence_of_a_draft() -> None:
    """Three deadlines in the same second are one second of silence."""
    service = Service(drafts=1)
    runnings = [service.submit() for _ in range(3)]
    for running in runnings:
        service.draft_round(running)
        service.clock.now += 0.25
    for _ in runnings:
        service.clock.now += 0.25
        service.sweep()
    assert [running.state.phase for running in runnings] == [Phase.VERIFYING] * 3
    assert service.drafts[0].hung_up == 0
    service.deadline(*runnings)
    assert service.drafts[0].hung_up == 1


def test_a_silent_draft_is_disconnected_ever_more_rarely() -> None:
    """It may be reading a long prompt, which a new connection restarts."""
    service = Service(drafts=1)
    (draft,) = service.drafts

    def deadlines_until_hung_up() -> int:
        running, before = service.submit(max_tokens=40), draft.hung_up
        for count in range(1, 20):
            service.deadline(running)
            if draft.hung_up > before:
                service.start_over(draft)
                service.it.cancel(running)
                return count
        raise AssertionError

    # A sequence of its own each, for one leaves the draft alone for longer every time.
    counts = [deadlines_until_hung_up() for _ in range(2)]
    assert counts == [2, 4]
    running = service.submit()
    service.draft_round(running)
    service.propose(running)
    service.it.cancel(running)
    assert deadlines_until_hung_up() == 2


def test_a_suspected_draft_gets_one_trial_sequence() -> None:
    """Without sequences it is the least loaded one."""
    service = Service(drafts=2)
    doubtful, sound = service.drafts
    first = service.submit()
    service.deadline(first)
    assert service.submit().draft is sound, "one deadline is reason enough"
    service.deadline(first)
    assert doubtful.hung_up == 1
    service.start_over(doubtful)
    assert (first.draft, doubtful.load, sound.load) == (sound, 0, 2)
    trial = service.submit()
    assert trial.draft is doubtful
    assert [service.submit().draft for _ in range(3)] == [sound] * 3
    service.draft_round(trial)
    service.propose(trial)
    assert [service.submit().draft for _ in range(3)] == [doubtful] * 3


def test_a_suspected_draft_is_used_when_no_other_is_idle() -> None:
    service = Service(drafts=2, max_running=20, max_waiting=20)
    doubtful, sound = service.drafts
    running = service.submit()
    service.deadline(running)
    service.deadline(running)
    service.start_over(doubtful)
    service.it.cancel(running)
    alone = service.submit()
    assert alone.draft is sound
    service.lose(sound)
    assert alone.draft is doubtful
    assert [service.submit().draft for _ in range(3)] == [doubtful] * 3


def test_a_sequence_waits_for_a_target_that_answers_others() -> None:
    """Moving would cost its place in a long backlog."""
    service = Service()
    late, lively = service.submit(k=0), service.submit(k=0, max_tokens=40)
    (target,) = service.targets
    target.sent.clear()
    for step in range(1, 21):
        service.clock.now = 3.0 * step
        service.answer(lively, 5)
        service.sweep()
    mine = [command for command in target.sent if command.sequence_id == late.state.sequence_id]
    assert mine == [VerifyRound(late.state.sequence_id, 1, 1, 2, (), Proposal())] * 5
    assert (target.hung_up, parts(late)) == (0, [])
    service.answer(late, 7)
    assert [commit.token_ids for commit in parts(late)] == [(7,)]  # type: ignore[union-attr]


def test_a_sequence_does_not_move_to_an_equally_loaded_target() -> None:
    service = Service(targets=2)
    late, _, lively = (service.submit(k=0) for _ in range(3))
    assert [target.load for target in service.targets] == [2, 1]
    service.clock.now = 9.0
    service.answer(lively, 5)
    service.clock.now = 10.0
    service.sweep()
    assert late.target is service.targets[0]
    assert late.machine.state.target.epoch == 1


def test_a_round_that_hangs_several_targets_fails() -> None:
    """Whatever ends the connection."""
    service = Service()
    running, (target,) = service.submit(k=0), service.targets
    for count in range(1, MAX_LOSSES + 1):
        assert parts(running) == []
        service.clock.now += 10.0
        service.sweep()
        assert target.hung_up == count
        service.start_over(target)
    (error,) = parts(running)
    assert isinstance(error, InternalError)
    assert (service.it.running, target.load) == (0, 0)


def test_a_client_that_does_not_read_is_cut() -> None:
    """Its unread parts are kept, followed by where to resume; the sequence's memory is freed."""
    service = Service()
    service.it._unread_timeout = 60.0
    running = service.submit(k=0)
    service.answer(running, 5)
    running.unread = limits.MAX_UNREAD_TOKENS
    service.answer(running, 6)
    service.answer(running, 7)  # of a round that the target had begun by itself by then, and so is 8
    service.answer(running, 8)
    assert running.state.phase is Phase.PAUSED
    service.clock.now = 59.0
    service.sweep()
    assert not running.ended
    service.clock.now = 60.0
    service.sweep()
    assert running.ended
    assert types(service.targets[0])[-1] is CloseSequence
    *commits, error = parts(running)
    assert [commit.token_ids for commit in commits] == [(5,), (6,), (7,), (8,)]  # type: ignore[union-attr]
    assert isinstance(error, UnavailableError)
    assert "may be resumed" in error.message
    assert error.last_index == 3


def test_a_client_that_reads_in_time_is_not_cut() -> None:
    service = Service()
    service.it._unread_timeout = 60.0
    running = service.submit(k=0)
    service.answer(running, 5)
    running.unread = limits.MAX_UNREAD_TOKENS
    service.answer(running, 6)
    running.unread = limits.MAX_UNREAD_TOKENS // 2 + 1
    service.clock.now = 59.0
    read(service, running)
    assert running.state.phase is Phase.VERIFYING
    service.clock.now = 61.0
    service.sweep()
    assert not running.ended


def test_a_lost_targets_sequences_move_to_another() -> None:
    service = Service(targets=2)
    running = service.submit()
    assert running.target is service.targets[0]
    service.lose(service.targets[0])
    assert running.target is service.targets[1]
    opening, command = service.targets[1].sent
    assert (opening.epoch, command.epoch) == (2, 2)
    assert [link.load for link in service.targets] == [0, 1]


def test_without_another_target_a_sequence_waits() -> None:
    service = Service()
    running = service.submit()
    service.lose(service.targets[0])
    assert (running.state.phase, running.target) == (Phase.STALLED, None)
    service.targets[0].ready = True
    service.it.link_ready(service.targets[0])  # type: ignore[arg-type]
    assert running.state.phase is Phase.VERIFYING
    assert service.targets[0].load == 1


def test_a_round_goes_on_after_losing_its_draft() -> None:
    service = Service(drafts=1)
    running = service.submit()
    service.answer(running, 5)
    service.lose(service.drafts[0])
    assert types(service.targets[0]) == [OpenSequence, VerifyRound, VerifyRound]
    assert (running.draft, service.drafts[0].load) == (None, 0)


def test_events_of_another_worker_are_dropped() -> None:
    service = Service(targets=2)
    running = service.submit()
    event = RoundVerdict("s1", 1, 1, Verdict(0, (5,), 2))
    service.it.link_events(service.targets[1], [event])  # type: ignore[arg-type]
    assert parts(running) == []
    service.it.link_events(service.targets[0], [RoundVerdict("other", 1, 1, Verdict(0, (5,), 2))])  # type: ignore[arg-type]
    service.answer(running, 5)
    assert len(parts(running)) == 1


def test_a_sequence_out_of_blocks_waits_for_an_end() -> None:
    service = Service()
    first, second = service.submit(max_tokens=1), service.submit()
    service.fail(second)
    assert (second.state.phase, service.it.waiting) == (Phase.WAITING, 1)
    service.answer(first, 5)
    assert (second.state.phase, service.it.waiting) == (Phase.VERIFYING, 0)


def test_a_sequence_that_got_blocks_wakes_the_next() -> None:
    service = Service()
    first, second, third = (service.submit() for _ in range(3))
    service.fail(second)
    service.fail(third)
    service.it.cancel(first)
    assert (second.state.phase, third.machine.state.phase) == (Phase.VERIFYING, Phase.WAITING)
    service.answer(second, 5)
    assert third.machine.state.phase is Phase.VERIFYING


def test_a_sequence_too_large_alone_is_failed() -> None:
    service = Service()
    running = service.submit()
    service.fail(running)
    assert running.state.phase is Phase.VERIFYING, "what held the blocks may have gone by now"
    service.clock.now = GRACE_SECONDS
    service.fail(running)
    assert parts(running) == [FULL]
    assert service.it.failed == 1


def test_blocks_of_an_ended_stream_are_waited_for() -> None:
    """The target may not yet have noticed the end of the last connection."""
    service = Service()
    running = service.submit()
    for _ in range(3):
        service.fail(running)
        service.clock.now += 0.1
        service.sweep()
        assert running.state.phase is Phase.VERIFYING
    service.answer(running, 5)
    assert len(parts(running)) == 1
    assert running.alone_since is None


def test_blocks_of_another_coordinator_are_waited_for() -> None:
    """No sequence of this coordinator holds any."""
    service = Service()
    running = service.submit()
    theirs = ResourceExhaustedError("no blocks", retry_after=1.0)
    for _ in range(5):
        service.fail(running, error=theirs)
        assert (running.state.phase, running.alone_since) == (Phase.WAITING, None)
        service.clock.now += GRACE_SECONDS
        service.sweep()
        assert running.state.phase is Phase.VERIFYING
    service.answer(running, 5)
    assert len(parts(running)) == 1


def test_two_sequences_out_of_blocks_at_once_both_go_on() -> None:
    """Both are closed, so their blocks are free."""
    service = Service()
    first, second = service.submit(), service.submit()
    service.fail(first, second)
    assert parts(first) == parts(second) == []
    assert {first.state.phase, second.state.phase} == {Phase.WAITING, Phase.VERIFYING}
    goes_on, waits = sorted((first, second), key=lambda r: r.state.phase is Phase.WAITING)
    service.answer(goes_on, 5)
    assert waits.machine.state.phase is Phase.VERIFYING


def test_a_sequence_out_of_blocks_at_anothers_end_goes_on() -> None:
    """The blocks it lacked are free by then."""
    service = Service()
    first, second = service.submit(max_tokens=1), service.submit()
    machine = first.machine
    ends = RoundVerdict(machine.state.sequence_id, 1, 1, Verdict(0, (5,), 2))
    service.it.link_events(service.targets[0], [ends, service.failure(second, FULL)])  # type: ignore[arg-type]
    assert second.state.phase is Phase.VERIFYING


def test_two_sequences_too_large_alone_both_fail() -> None:
    service = Service()
    first, second = service.submit(), service.submit()
    for _ in range(10):
        for running in (first, second):
            if running.state.phase is Phase.VERIFYING:
                service.fail(running)
        service.clock.now += GRACE_SECONDS / 2
        service.sweep()
    assert parts(first) == parts(second) == [FULL]


def test_waiting_for_one_target_does_not_delay_another() -> None:
    """Blocks freed on one target wake the oldest sequence of that target."""
    service = Service(targets=2)
    holds, other, waits, starves = (service.submit() for _ in range(4))
    assert [r.target is service.targets[i % 2] for i, r in enumerate((holds, other, waits, starves))] == [
        True
    ] * 4
    service.fail(waits)
    service.fail(starves)
    assert service.it.waiting == 2
    service.it.cancel(other)
    assert (waits.machine.state.phase, starves.machine.state.phase) == (Phase.WAITING, Phase.VERIFYING)
    service.fail(starves)
    assert starves.machine.state.phase is Phase.VERIFYING, "nobody holds any there"
    service.it.cancel(holds)
    assert waits.machine.state.phase is Phase.VERIFYING


def test_time_in_the_queue_is_not_time_without_a_target() -> None:
    """The recovery timeout begins with the loss of the target."""
    service = Service(max_running=1)
    first, second = service.submit(), service.submit()
    service.clock.now = 500.0
    service.lose(service.targets[0])
    service.it.cancel(first)
    assert second.admitted
    service.sweep()
    assert second.state.phase is Phase.NEW
    service.clock.now = 599.0
    service.sweep()
    assert second.state.phase is Phase.NEW
    service.clock.now = 600.0
    service.sweep()
    (error,) = parts(second)
    assert isinstance(error, UnavailableError)


def test_a_sequence_waiting_for_blocks_can_be_cancelled() -> None:
    service = Service()
    first, second, third = (service.submit() for _ in range(3))
    service.fail(second)
    service.fail(third)
    service.it.cancel(second)
    assert service.it.waiting <= 1
    service.it.cancel(first)
    assert third.machine.state.phase is Phase.VERIFYING


def test_the_oldest_waiting_sequence_retries_first() -> None:
    service = Service()
    first, second, third, fourth = (service.submit() for _ in range(4))
    service.fail(fourth)
    service.fail(second)
    service.fail(third)
    service.it.cancel(first)
    assert [r.state.phase for r in (second, third, fourth)] == [Phase.VERIFYING, Phase.WAITING, Phase.WAITING]


def test_nobody_is_admitted_before_one_waiting_for_blocks() -> None:
    """The newest would be preempted first."""
    service = Service(max_waiting=1)
    first, second = service.submit(), service.submit()
    service.fail(second)
    third = service.submit()
    assert (third.admitted, service.it.waiting) == (False, 2)
    with pytest.raises(ResourceExhaustedError):
        service.submit()
    service.it.cancel(first)
    assert second.state.phase is Phase.VERIFYING
    assert third.admitted


def test_a_preempted_sequence_is_counted_once() -> None:
    service = Service()
    first, second = service.submit(), service.submit()
    service.fail(second)
    assert service.it.num_preemptions == 0, "it had none yet"
    service.answer(first, 5)
    service.fail(first)
    assert second.state.phase is Phase.WAITING
    assert service.it.num_preemptions == 1
    service.fail(first)
    assert service.it.num_preemptions == 1


def test_a_slow_clients_blocks_go_to_a_waiting_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise others would wait for the slow client."""
    monkeypatch.setattr(limits, "MAX_UNREAD_TOKENS", 1)
    service = Service()
    slow, other = service.submit(), service.submit()
    for token in (5, 6, 7, 8):
        service.answer(slow, token)
    assert slow.machine.state.phase is Phase.PAUSED
    service.fail(other)
    assert other.state.phase is Phase.WAITING
    service.sweep()
    assert other.state.phase is Phase.VERIFYING
    assert types(service.targets[0])[-2:] == [CloseSequence, VerifyRound]
    assert service.it.num_preemptions == 1
    while slow.machine.state.phase is Phase.PAUSED:
        read(service, slow)
    assert types(service.targets[0])[-2:] == [OpenSequence, VerifyRound]


def test_a_slow_clients_blocks_go_to_one_waiting_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_TOKENS", 1)
    service = Service()
    slow, _busy, waits = (service.submit() for _ in range(3))
    for token in (5, 6, 7, 8):
        service.answer(slow, token)
    service.fail(waits)
    service.sweep()
    assert waits.machine.state.phase is Phase.VERIFYING


def test_a_moving_sequences_blocks_go_to_a_waiting_one() -> None:
    service = Service(targets=2)
    late, other, waits, _, third = (service.submit() for _ in range(5))
    assert late.target is waits.target is third.target is service.targets[0]
    service.it.cancel(other)
    service.fail(waits)
    service.clock.now = 9.5
    service.answer(third, 5)
    assert waits.machine.state.phase is Phase.WAITING
    service.clock.now = 10.0
    service.sweep()
    assert waits.machine.state.phase is Phase.VERIFYING


def test_a_slow_client_pauses_only_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_TOKENS", 2)
    service = Service()
    slow, other = service.submit(), service.submit()
    for token in (5, 6, 7):
        service.answer(slow, token)
        service.answer(other, token)
        read(service, other)
    # The bound is noticed with the commit that passes it; by then a round has begun, and the target was told
    # of another one after it.
    for token in (8, 9):
        service.answer(slow, token)
    assert (slow.machine.state.phase, other.state.phase) == (Phase.PAUSED, Phase.VERIFYING)
    assert slow.unread == 5
    for _ in range(4):
        assert slow.machine.state.phase is Phase.PAUSED
        read(service, slow)
    assert slow.machine.state.phase is Phase.VERIFYING


def test_shutdown_ends_every_sequence_with_one_error() -> None:
    service = Service(max_running=1)
    first, second = service.submit(), service.submit()
    error = UnavailableError("shutting down")
    service.it.abort_all(error)
    for running in (first, second):
        (told,) = parts(running)
        assert isinstance(told, UnavailableError)
        assert (told.message, told.last_index) == ("shutting down", None)
    assert (service.it.running, service.it.waiting, service.targets[0].load) == (0, 0, 0)


def test_next_rounds_are_sent_before_commits_are_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target waits for the next rounds of all verdicts in one frame."""
    service = Service(drafts=1)
    one, two = service.submit(k=0), service.submit(k=0)
    (target,), seen = service.targets, []

    def flush() -> None:
        seen.append((types(target)[4:], one.parts.qsize(), two.parts.qsize()))

    monkeypatch.setattr(target, "flush", flush)
    service.it.link_events(target, [verdict_of(one, 5), verdict_of(two, 6)])  # type: ignore[arg-type]
    assert seen == [([VerifyRound, VerifyRound], 0, 0)]
    assert [[part.token_ids for part in parts(each)] for each in (one, two)] == [[(5,)], [(6,)]]  # type: ignore[union-attr]
    assert service.drafts[0].flushed == len(service.drafts[0].sent)


def test_answers_in_one_frame_are_emitted_in_order() -> None:
    """Also where the second answer ends the sequence."""
    service = Service()
    other, ends, fails = service.submit(k=0), service.submit(k=0, max_tokens=2), service.submit(k=0)
    events: list[Any] = [verdict_of(running, 5) for running in (other, ends, fails)]
    second = dataclasses.replace(verdict_of(ends, 6), round=2, verdict=Verdict(0, (6,), 3))
    refusals = [
        dataclasses.replace(service.failure(fails, InvalidArgumentError("field", "is wrong")), round=2)
    ]
    service.it.link_events(service.targets[0], [*events, second, *refusals])  # type: ignore[arg-type]
    told = [parts(running) for running in (other, ends, fails)]
    assert [[getattr(part, "token_ids", None) for part in each] for each in told] == [
        [(5,)],
        [(5,), (6,)],
        [(5,), None],
    ]
    assert isinstance(told[2][1], InvalidArgumentError)
    assert (ends.ended, service.it.running) == (True, 1)


def test_the_last_tokens_come_before_the_final_error() -> None:
    """Where no target serves the next round."""
    service = Service()
    running = service.submit(k=0)
    running.state.planner.target_max_len = len(running.state.ledger) + 1
    service.answer(running, 5)
    commit, error = parts(running)
    assert isinstance(commit, Commit)
    assert isinstance(error, UnavailableError)
    assert (commit.token_ids, error.last_index) == ((5,), commit.index)
    assert (running.error, service.it.failed) == (error, 1)


def test_an_exception_in_one_sequence_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end the link's task."""
    service = Service()
    first, second = service.submit(), service.submit()
    monkeypatch.setattr(first.state.ledger, "_detokenizer", None)
    events = [RoundVerdict(name, 1, 1, Verdict(0, (5,), 2)) for name in ("s1", "s2")]
    service.it.link_events(service.targets[0], events)  # type: ignore[arg-type]
    (error,) = parts(first)
    assert isinstance(error, InternalError)
    assert "NoneType" not in str(error)
    assert len(parts(second)) == 1
    assert types(service.targets[0])[4:] == [CloseSequence, VerifyRound]


def test_one_requests_failure_ends_no_other() -> None:
    service = Service()
    first, second = service.submit(), service.submit()
    service.fail(first, error=InternalError("nan"))
    assert isinstance(parts(first)[0], InternalError)
    service.answer(second, 5)
    assert len(parts(second)) == 1


def test_a_moved_sequence_takes_its_new_targets_length() -> None:
    service = Service(targets=2)
    running = service.submit(k=0)
    other = next(link for link in service.targets if link is not running.target)
    other.known.max_model_len = 30
    service.lose(running.target)  # type: ignore[arg-type]
    assert running.target is other
    assert running.state.planner.target_max_len == 30
