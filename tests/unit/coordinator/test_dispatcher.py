"""The dispatcher: assignment of workers, deadlines, losses and emitted parts. Links are fakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.round.state import MAX_LOSSES
from coordinator.scheduling.quarantine import SUSPECT
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.messages import Phase, Signal
from paceline.core import limits
from paceline.core.errors import InternalError, InvalidArgumentError, NotFoundError, UnavailableError
from paceline.core.messages import (
    CloseSequence,
    DraftRound,
    OpenSequence,
    PromptLogprobs,
    RoundVerdict,
    VerifyRound,
)
from paceline.core.types import Proposal, Verdict
from tests.unit.coordinator.service import Service, failure_of, parts, phases, read, told, verdict_of


def test_a_sequence_gets_the_least_loaded_workers() -> None:
    service = Service(targets=3, drafts=2)
    service.targets[0].ready = False
    first, second, third = service.submit(), service.submit(), service.submit(k=0)
    _, one, two = service.targets
    assert [r.target for r in (first, second, third)] == [one, two, one]
    assert [r.drafts[0] for r in (first, second, third)] == [*service.drafts, None]
    assert [link.load for link in (*service.targets, *service.drafts)] == [0, 2, 1, 1, 1]


def test_the_draft_is_opened_in_the_first_round() -> None:
    service = Service(drafts=1)
    running, (draft,) = service.submit(), service.drafts
    assert service.target.types == [OpenSequence, VerifyRound]
    assert draft.types == [OpenSequence]
    service.answer(running, 5)
    assert draft.types == [OpenSequence, DraftRound]


def test_commits_reach_the_client_and_the_end_frees_the_worker() -> None:
    service = Service()
    running = service.submit(max_tokens=2)
    service.answer(running, 5)
    service.answer(running, 6)
    first, last = parts(running)
    assert (first.index, first.finish, last.index) == (0, None, 1)
    assert last.finish is not None
    assert service.target.types[-1] is CloseSequence
    assert (service.counts, service.target.load) == ((0, 0), 0)
    assert (service.it.finished, service.it.failed) == (1, 0)


def test_events_of_another_worker_are_dropped() -> None:
    service = Service(targets=2)
    running = service.submit()
    verdict = Verdict(0, (5,), 2)
    service.it.link_events(service.targets[1], [RoundVerdict("s1", 1, 1, verdict)])
    assert parts(running) == []
    service.it.link_events(service.target, [RoundVerdict("other", 1, 1, verdict)])
    service.answer(running, 5)
    assert told(running) == [(5,)]


def test_shutdown_ends_every_sequence_with_one_error() -> None:
    service = Service(max_running=1)
    first, second = service.begin(2)
    service.it.abort_all(UnavailableError("shutting down"))
    for running in (first, second):
        (error,) = parts(running)
        assert isinstance(error, UnavailableError)
        assert (error.message, error.last_index) == ("shutting down", None)
    assert (service.counts, service.target.load) == ((0, 0), 0)


def test_next_rounds_are_sent_before_commits_are_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target waits for the next rounds of all verdicts in one frame."""
    service = Service(drafts=1)
    one, two = service.begin(2, k=0)
    target, seen = service.target, []
    monkeypatch.setattr(
        target, "flush", lambda: seen.append((target.types[4:], one.parts.qsize(), two.parts.qsize()))
    )
    service.it.link_events(target, [verdict_of(one, 5), verdict_of(two, 6)])
    assert seen == [([VerifyRound, VerifyRound], 0, 0)]
    assert (told(one), told(two)) == ([(5,)], [(6,)])
    assert service.drafts[0].flushed == len(service.drafts[0].sent)


def test_answers_in_one_frame_are_emitted_in_order() -> None:
    """Also where the second answer ends the sequence."""
    service = Service()
    other, ends, fails = service.submit(k=0), service.submit(k=0, max_tokens=2), service.submit(k=0)
    events: list[Any] = [verdict_of(running, 5) for running in (other, ends, fails)]
    second = dataclasses.replace(verdict_of(ends, 6), round=2, verdict=Verdict(0, (6,), 3))
    refusal = dataclasses.replace(failure_of(fails, InvalidArgumentError("field", "is wrong")), round=2)
    service.it.link_events(service.target, [*events, second, refusal])
    assert told(other) == [(5,)]
    assert told(ends) == [(5,), (6,)]
    assert told(fails) == [(5,), InvalidArgumentError]
    assert (ends.ended, service.it.running) == (True, 1)


def test_the_last_tokens_come_before_the_final_error() -> None:
    """Where no target serves the next round."""
    service = Service()
    running = service.submit(k=0)
    running.state.planner.target_max_len = len(running.state.ledger) + 1
    service.answer(running, 5)
    commit, error = parts(running)
    assert isinstance(error, UnavailableError)
    assert (commit.token_ids, error.last_index) == ((5,), commit.index)
    assert (running.error, service.it.failed) == (error, 1)


def test_an_exception_in_one_sequence_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end the link's task."""
    service = Service()
    first, second = service.begin(2)
    monkeypatch.setattr(first.state.ledger, "_detokenizer", None)
    service.it.link_events(service.target, [verdict_of(first, 5), verdict_of(second, 5)])
    (error,) = parts(first)
    assert isinstance(error, InternalError)
    assert "NoneType" not in str(error)
    assert told(second) == [(5,)]
    assert service.target.types[4:] == [CloseSequence, VerifyRound]


def test_one_requests_failure_ends_no_other() -> None:
    service = Service()
    first, second = service.begin(2)
    service.fail(first, error=InternalError("nan"))
    service.answer(second, 5)
    assert (told(first), told(second)) == ([InternalError], [(5,)])


# ---- clients ----------------------------------------------------------------------------------------


def test_a_held_request_is_not_cut_before_it_is_read() -> None:
    service = Service(unread_timeout=60.0)
    running = service.submit(k=0)
    running.behind_since, running.read, running.state.deadline = 0.0, False, None
    service.at(61.0)
    assert not running.ended
    running.read = True
    service.sweep()
    assert isinstance(running.error, UnavailableError)


def test_a_client_that_does_not_read_is_cut() -> None:
    """Its unread parts are kept, followed by where to resume; the sequence's memory is freed."""
    service = Service(unread_timeout=60.0)
    running = service.submit(k=0)
    service.answer(running, 5)
    running.unread = limits.MAX_UNREAD_TOKENS
    service.answer(running, 6)
    service.answer(running, 7)  # of a round that the target had begun by itself by then, and so is 8
    service.answer(running, 8)
    assert running.state.phase is Phase.PAUSED
    service.at(59.0)
    assert not running.ended
    service.at(60.0)
    assert running.ended
    assert service.target.types[-1] is CloseSequence
    *commits, error = parts(running)
    assert [commit.token_ids for commit in commits] == [(5,), (6,), (7,), (8,)]
    assert isinstance(error, UnavailableError)
    assert "may be resumed" in error.message
    assert error.last_index == 3


def test_a_client_that_reads_in_time_is_not_cut() -> None:
    service = Service(unread_timeout=60.0)
    running = service.submit(k=0)
    service.answer(running, 5)
    running.unread = limits.MAX_UNREAD_TOKENS
    service.answer(running, 6)
    running.unread = limits.MAX_UNREAD_TOKENS // 2 + 1
    service.clock.now = 59.0
    read(service, running)
    assert running.state.phase is Phase.VERIFYING
    service.at(61.0)
    assert not running.ended


def test_a_slow_client_pauses_only_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_TOKENS", 2)
    service = Service()
    slow, other = service.begin(2)
    for token in (5, 6, 7):
        service.answer(slow, token)
        service.answer(other, token)
        read(service, other)
    # The bound is noticed with the commit that passes it; by then a round has begun, and the target was told
    # of another one after it.
    for token in (8, 9):
        service.answer(slow, token)
    assert phases(slow, other) == [Phase.PAUSED, Phase.VERIFYING]
    assert slow.unread == 5
    for _ in range(4):
        assert slow.state.phase is Phase.PAUSED
        read(service, slow)
    assert slow.state.phase is Phase.VERIFYING


# ---- targets ----------------------------------------------------------------------------------------


def test_sweeping_applies_deadlines() -> None:
    service = Service()
    running = service.submit()
    service.at(9.9)
    assert service.target.hung_up == 0
    service.at(10.0)
    assert service.target.hung_up == 1
    service.lose(service.target)
    assert running.state.phase is Phase.STALLED
    service.at(110.0)
    assert told(running) == [UnavailableError]
    assert service.it.failed == 1


@pytest.mark.parametrize("targets", [1, 2])
def test_a_target_answering_others_stays_connected(targets: int) -> None:
    """Only the late sequence moves, to another target with less to do."""
    service = Service(targets=targets)
    late, lively = service.begin(2, k=0)
    lively.target = service.target
    service.target.load, service.targets[-1].load = 2, 2 if targets == 1 else 0
    service.target.sent.clear()
    for second in (3.0, 6.0, 9.0):
        service.clock.now = second
        service.answer(lively, 5)
    service.at(10.0)
    assert [target.hung_up for target in service.targets] == [0] * targets
    assert late.target is service.targets[-1]
    assert (late.state.phase, late.state.target.epoch) == (Phase.VERIFYING, targets)
    assert type(service.target.sent_to(late)[0]) is (VerifyRound if targets == 1 else CloseSequence)
    assert sum(target.load for target in service.targets) == 2
    assert lively.state.target.epoch == 1
    service.answer(late, 7)
    assert told(late) == [(7,)]


def test_a_target_answering_nobody_is_disconnected() -> None:
    service = Service()
    late, other = service.begin(2, k=0)
    service.clock.now = 4.9
    service.answer(other, 5)
    service.at(10.0)
    assert service.target.hung_up == 1
    assert late.state.phase is Phase.STALLED


def test_a_target_reporting_a_prompt_stays_connected() -> None:
    """A long prompt's reports count as answers."""
    service = Service()
    reporting, waiting = service.begin(2, k=0)
    service.clock.now = 9.9
    reporting.state.deadline = 19.9
    service.it.link_events(service.target, [PromptLogprobs(reporting.state.sequence_id, 99, 1, 0, ())])
    service.at(10.0)
    assert service.target.hung_up == 0
    assert waiting.state.phase is Phase.VERIFYING


def test_a_sequence_waits_for_a_target_that_answers_others() -> None:
    """Moving would cost its place in a long backlog."""
    service = Service()
    late, lively = service.submit(k=0), service.submit(k=0, max_tokens=40)
    service.target.sent.clear()
    for step in range(1, 21):
        service.clock.now = 3.0 * step
        service.answer(lively, 5)
        service.sweep()
    again = VerifyRound(late.state.sequence_id, 1, 1, 2, (), Proposal())
    assert service.target.sent_to(late) == [again] * 5
    assert (service.target.hung_up, parts(late)) == (0, [])
    service.answer(late, 7)
    assert told(late) == [(7,)]


def test_a_sequence_does_not_move_to_an_equally_loaded_target() -> None:
    service = Service(targets=2)
    late, _, lively = service.begin(3, k=0)
    assert [target.load for target in service.targets] == [2, 1]
    service.clock.now = 9.0
    service.answer(lively, 5)
    service.at(10.0)
    assert (late.target, late.state.target.epoch) == (service.target, 1)


def test_a_round_that_hangs_several_targets_fails() -> None:
    """Whatever ends the connection."""
    service = Service()
    running, target = service.submit(k=0), service.target
    for count in range(1, MAX_LOSSES + 1):
        assert parts(running) == []
        service.after(10.0)
        assert target.hung_up == count
        service.start_over(target)
    assert told(running) == [InternalError]
    assert (service.it.running, target.load) == (0, 0)


def test_a_lost_targets_sequences_move_to_another() -> None:
    service = Service(targets=2)
    running, (lost, other) = service.submit(), service.targets
    other.known.max_model_len = 30
    assert running.target is lost
    service.lose(lost)
    assert running.target is other
    opening, command = other.sent
    assert (opening.epoch, command.epoch) == (2, 2)
    assert (lost.load, other.load) == (0, 1)
    assert running.state.planner.target_max_len == 30


def test_without_another_target_a_sequence_waits() -> None:
    service = Service()
    running = service.submit()
    service.lose(service.target)
    assert (running.state.phase, running.target) == (Phase.STALLED, None)
    service.ready(service.target)
    assert (running.state.phase, service.target.load) == (Phase.VERIFYING, 1)


# ---- requests that kill their targets -----------------------------------------------------------------


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
            service.start_over(poison.target)
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
    sequences = service.begin(5, k=0, max_tokens=6)
    poison = sequences.pop(place)
    assert serve_until_all_end(service, [poison, *sequences], poison) == MAX_LOSSES
    assert told(poison)[-1] is InternalError
    assert [told(running) for running in sequences] == [[(5,)] * 6] * 4
    assert service.it.failed == 1
    assert not service.it.workers._suspects.waiting


def test_requests_arriving_beside_a_killer_are_served() -> None:
    service = Service()
    sequences = service.begin(3, k=0, max_tokens=6)
    for _ in range(5):
        service.start_over(service.target)
        sequences.append(service.submit(k=0, max_tokens=6))
    serve_until_all_end(service, sequences, sequences[0])
    assert [running.error is None for running in sequences] == [False, *[True] * 7]


def suspects(count: int, **more: int) -> tuple[Service, Any]:
    """Their target dies as often as makes suspects of them; the first is tried, the others wait."""
    service = Service(**more)
    runnings = service.begin(count, k=0)
    for _ in range(SUSPECT):
        service.start_over(service.target)
    assert phases(*runnings) == [Phase.VERIFYING, *[Phase.STALLED] * (count - 1)]
    return service, runnings


def test_a_suspect_awaiting_its_turn_has_no_recovery_deadline() -> None:
    """The turns before it may take longer than the recovery timeout."""
    service, (first, second) = suspects(2)
    for now in range(50, 500, 50):
        first.state.deadline = None
        service.at(float(now))
    assert second.state.phase is Phase.STALLED
    service.target.ready = False
    service.after(101.0)
    assert isinstance(second.error, UnavailableError), "without a target it does"


def test_a_suspect_goes_on_at_its_turn() -> None:
    service, (first, second) = suspects(2)
    service.answer(first, 5)
    assert second.state.phase is Phase.VERIFYING
    assert first.state.losses == 0


def test_a_sequence_waiting_for_blocks_does_not_delay_suspects() -> None:
    """Its verdict may take as long as other sequences' answers."""
    service = Service()
    suspect = service.submit(k=0)
    service.start_over(service.target)
    fitting, waiting = service.begin(2, k=0)
    service.start_over(service.target)
    service.fail(waiting)
    assert (waiting.state.phase, waiting.state.losses) == (Phase.WAITING, 1)
    service.answer(fitting, 5)
    service.sweep()
    assert suspect.state.phase is Phase.VERIFYING


def test_a_verdict_clears_a_suspect_that_then_pauses() -> None:
    """Suspects must not wait for its client."""
    service, (paused, suspect) = suspects(2)
    service.it._handle(paused, Signal.CLIENT_BEHIND)
    service.answer(paused, 5)
    assert (paused.state.phase, paused.state.losses) == (Phase.PAUSED, 0)
    assert suspect.state.phase is Phase.VERIFYING


def test_suspects_ending_on_their_turn_leave_nothing() -> None:
    """An ended sequence must not be assigned workers again."""
    service = Service(drafts=1, max_running=300, max_waiting=300)
    runnings = service.begin(250, k=0)
    service.start_over(service.target)
    service.lose(service.target)
    for running in runnings:
        running.state.target.losses = SUSPECT
    service.target.known.max_model_len = 1
    service.ready(service.target)
    assert all(running.ended for running in runnings)
    assert [link.load for link in (*service.targets, *service.drafts)] == [0, 0]
    assert not service.it.workers._suspects.waiting


def test_a_cancelled_suspect_is_forgotten() -> None:
    service, (first, second) = suspects(2)
    service.it.cancel(second)
    assert not service.it.workers._suspects.waiting
    service.it.cancel(first)
    assert service.target.load == 0


# ---- drafts -----------------------------------------------------------------------------------------


def test_a_round_goes_on_after_losing_its_draft() -> None:
    service = Service(drafts=1)
    running, (draft,) = service.submit(), service.drafts
    service.answer(running, 5)
    service.lose(draft)
    assert service.target.types == [OpenSequence, VerifyRound, VerifyRound]
    assert (running.drafts[0], draft.load) == (None, 0)


def test_a_silent_drafts_sequences_move_to_another() -> None:
    """Otherwise each would return to it after some rounds and wait again."""
    service = Service(drafts=2)
    hung, sound = service.drafts
    one, other, two = service.begin(3)
    assert [running.drafts[0] for running in (one, other, two)] == [hung, sound, hung]
    service.deadline(one, two)
    assert (hung.hung_up, sound.hung_up) == (0, 0), "it may be reading a long prompt"
    service.draft_round(other)
    service.propose(other)
    service.deadline(one, two)
    assert (hung.hung_up, sound.hung_up) == (1, 0)
    service.lose(hung)
    assert [running.drafts[0] for running in (one, other, two)] == [sound] * 3
    for running in (one, two):
        service.draft_round(running)
        service.propose(running)
        assert running.state.present.proposal.num_draft_tokens == 3
        service.answer(running, 7, 8, 9, 5)


def test_a_draft_late_for_one_sequence_stays_connected() -> None:
    service = Service(drafts=2)
    draft = service.drafts[0]
    late, _, lively = service.begin(3, max_tokens=40)
    assert late.drafts[0] is lively.drafts[0] is draft
    for _ in range(4):
        service.draft_round(late, lively)
        service.clock.now += 0.1
        service.propose(lively)
        service.answer(lively, 7, 8, 9, 5)
        service.after(0.9)
    assert (draft.hung_up, late.drafts[0]) == (0, draft)
    assert late.state.phase is Phase.VERIFYING


@pytest.mark.parametrize("says", ["its proposal, too late", "that it lacks the sequence"])
def test_a_draft_that_answers_anything_is_not_hanging(says: str) -> None:
    """It is slow: each round of its only sequence is answered after the deadline."""
    service = Service(drafts=1)
    running, (draft,) = service.submit(max_tokens=40), service.drafts
    for _ in range(4):
        service.draft_round(running)
        asked = running.state.round
        service.deadline(running)
        if says == "its proposal, too late":
            service.propose(running, of_round=asked)
        else:
            service.it.link_events(draft, [failure_of(running, NotFoundError("no such sequence"))])
    assert draft.hung_up == 0


def test_sequences_share_one_silence_of_a_draft() -> None:
    """Three deadlines in the same second are one second of silence."""
    service = Service(drafts=1)
    runnings = service.begin(3)
    for running in runnings:
        service.draft_round(running)
        service.clock.now += 0.25
    for _ in runnings:
        service.after(0.25)
    assert phases(*runnings) == [Phase.VERIFYING] * 3
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
    assert [deadlines_until_hung_up() for _ in range(2)] == [2, 4]
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
    assert service.submit().drafts[0] is sound, "one deadline is reason enough"
    service.deadline(first)
    assert doubtful.hung_up == 1
    service.start_over(doubtful)
    assert (first.drafts[0], doubtful.load, sound.load) == (sound, 0, 2)
    trial = service.submit()
    assert trial.drafts[0] is doubtful
    assert [running.drafts[0] for running in service.begin(3)] == [sound] * 3
    service.draft_round(trial)
    service.propose(trial)
    assert [running.drafts[0] for running in service.begin(3)] == [doubtful] * 3


def test_a_suspected_draft_is_used_when_no_other_is_idle() -> None:
    service = Service(drafts=2, max_running=20, max_waiting=20)
    doubtful, sound = service.drafts
    running = service.submit()
    service.deadline(running)
    service.deadline(running)
    service.start_over(doubtful)
    service.it.cancel(running)
    alone = service.submit()
    assert alone.drafts[0] is sound
    service.lose(sound)
    assert alone.drafts[0] is doubtful
    assert [running.drafts[0] for running in service.begin(3)] == [doubtful] * 3
