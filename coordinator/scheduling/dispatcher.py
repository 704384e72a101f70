"""The asyncio shell around the round machines: it carries out their actions and brings back events.

This module decides which worker a sequence uses and when a deadline has passed. Which sequences wait for a
place is decided in admission.py, which wait for blocks in block_waiters.py, and what a sequence does about
each event in coordinator/round/.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.round.machine import RoundMachine
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.block_waiters import Blocks
from coordinator.scheduling.observer import SequenceObserver, tell_all
from coordinator.scheduling.quarantine import Suspects
from coordinator.scheduling.routing import PrefixRouter
from coordinator.scheduling.running_sequence import UNREAD, Parts, Running, Untold
from coordinator.scheduling.watchdog import Silence
from coordinator.sequence.ledger import Commit
from coordinator.sequence.messages import (
    Action,
    DraftLeft,
    DraftLost,
    DraftReady,
    Emit,
    Event,
    Fail,
    FromDraft,
    FromTarget,
    Phase,
    Signal,
    TargetHangs,
    ToDraft,
    ToTarget,
    WaitForBlocks,
)
from coordinator.sequence.replay_buffer import ReplayBuffer
from coordinator.sequence.round_record import RoundRecord
from coordinator.workers.links import Link
from paceline.core import limits
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import InternalError, PacelineError, UnavailableError
from paceline.core.messages import PromptLogprobs, RoundVerdict, SequenceFailed
from paceline.telemetry.logs import fields
from paceline.v1 import common_pb2

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.05
"""Seconds between two checks of the deadlines."""
STUCK_SHARE = 0.5
"""Share of the target's deadline: a target that gave no verdict to any sequence for so long hangs."""


class Dispatcher:
    """All sequences of this coordinator."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        clock: Clock = monotonic,
        observers: Sequence[SequenceObserver] = (),
        *,
        unread_timeout: float = math.inf,
    ) -> None:
        self.targets: list[Link] = []
        self.drafts: list[Link] = []
        self.leaving: list[Link] = []
        """Workers that keep their sequences and get no new ones."""
        self.finished = 0
        self.failed = 0
        self.num_preemptions = 0
        """How often a sequence lost its blocks to another one."""
        self._clock = clock
        self._observers = tuple(observers)
        self._unread_timeout = unread_timeout
        self._sequences: dict[str, Running] = {}
        self._blocks = Blocks(self._sequences, self._handle)
        self._admission = Admission(self._sequences, self._blocks, clock, max_running, max_waiting)
        self._suspects = Suspects(self._sequences)
        self._router = PrefixRouter()
        self._submitted = 0
        self._heard: dict[Link, float] = {}
        """When a target worker last gave a verdict, or a part of a prompt's report."""
        self._silences: defaultdict[Link, Silence] = defaultdict(Silence)
        """Of the draft workers."""
        self._held: Untold | None = None  # but while a frame of answers is taken up

    @property
    def running(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place or for blocks."""
        return self._admission.waiting + len(self._blocks.waiting)

    # ---- for the API -----------------------------------------------------------------------------

    def check_fits(self, n: int) -> None:
        """Raises InvalidArgumentError if a request has more sequences than may ever run and wait."""
        self._admission.check_fits(n)

    def submit(self, machine: RoundMachine, replay: ReplayBuffer | None = None) -> Running:
        """Accept a sequence; one that has ended already is returned as it is.

        Raises ResourceExhaustedError when the queue is full.
        """
        self._submitted += 1
        running = Running(machine, order=self._submitted, arrived_at=self._clock(), replay=replay)
        if machine.state.phase is Phase.DONE:
            return running
        self._admission.check_room()
        self._sequences[machine.state.sequence_id] = running
        self._admission.join(running)
        self._admit()
        return running

    async def next_part(self, running: Running, parts: Parts | None = None) -> Commit | PacelineError:
        """The next part for a client, from the queue that it began to read."""
        mine = running.parts if parts is None else parts
        part = await mine.get()
        if isinstance(part, Commit) and mine is running.parts:
            running.unread -= len(part.token_ids)
            if running.behind_since is not None and running.unread <= limits.MAX_UNREAD_TOKENS // 2:
                self._caught_up(running)
        return part

    def take_over(self, running: Running, error: PacelineError) -> None:
        """Another client reads from now on, and only what is still to come; the previous one gets `error`.

        If the sequence has failed, the new client gets that error too: the previous one may have read it
        without showing it to anybody.
        """
        before, running.parts, running.read = running.parts, asyncio.Queue(), True
        while not before.empty():
            before.get_nowait()
        if running.error is not None:
            running.parts.put_nowait(running.error)
        before.put_nowait(error)
        running.unread = 0
        if running.behind_since is not None:
            self._caught_up(running)

    def _caught_up(self, running: Running) -> None:
        running.behind_since = None
        self._handle(running, Signal.CLIENT_CAUGHT_UP)

    def cancel(self, running: Running) -> None:
        """The client left: both workers free their blocks of the sequence at once."""
        self._handle(running, Signal.CANCEL)

    def abort_all(self, error: PacelineError) -> None:
        """End every sequence, at shutdown. An UnavailableError is given the last index of each sequence."""
        for running in list(self._sequences.values()):
            last_index = running.state.ledger.num_generated - 1
            known = isinstance(error, UnavailableError)
            self.abort(running, UnavailableError(error.message, last_index) if known else error)

    def abort(self, running: Running, error: PacelineError) -> None:
        """End a sequence with an error, unless it has ended."""
        if not running.ended:
            self._carry_out(running, running.machine.give_up(error))

    # ---- for the fleet -----------------------------------------------------------------------------

    def link_entered(self, link: Link) -> None:
        """The worker gets sequences from now on."""
        if link in self.leaving:
            self.leaving.remove(link)
        self._peers(link).append(link)
        if link.ready:
            self.link_ready(link)

    def link_leaving(self, link: Link) -> None:
        """The worker gets no new sequences. If it is stopping, others take its present ones."""
        self._peers(link).remove(link)
        self.leaving.append(link)
        self._hand_over()

    def link_left(self, link: Link) -> None:
        """Nobody has to do with the worker any more."""
        self.leaving.remove(link)
        self._heard.pop(link, None)
        self._router.forget(link)
        self._silences.pop(link, None)

    def _peers(self, link: Link) -> list[Link]:
        return self.targets if link.role == "target" else self.drafts

    # ---- for the links -----------------------------------------------------------------------------

    def link_ready(self, link: Link) -> None:
        """A worker is ready: sequences without a worker of its role take it, suspects last."""
        for running in sorted(self._sequences.values(), key=lambda running: running.state.losses):
            if running.admitted and not running.ended:
                self._assign(running)
        self._hand_over()

    def link_lost(self, link: Link) -> None:
        """A worker is lost: its sequences are told, then move to another worker if there is one."""
        self._router.forget(link)
        for running in list(self._sequences.values()):
            if running.target is link:
                running.target = None
                link.load -= 1
                tell_all(self._observers, lambda observer: observer.worker_lost("target"))
                self._handle(running, Signal.TARGET_LOST)
            elif link in running.drafts:
                number = self._take_draft(running, link)
                tell_all(self._observers, lambda observer: observer.worker_lost("draft"))
                self._handle(running, DraftLost(number))
            if running.admitted and not running.ended:
                self._assign(running)

    def link_events(self, link: Link, events: Iterable[Any]) -> None:
        """Process a worker's answers. The rounds that follow are sent before clients are told."""
        held = self._held = Untold()
        try:
            self._take_up(link, events)
            for each in (*self.targets, *self.drafts, *self.leaving):
                each.flush()
        finally:
            self._held = None
            self._release(held)

    def _take_up(self, link: Link, events: Iterable[Any]) -> None:
        if link in self.drafts or link in self._silences:
            self._silences[link] = Silence(self._clock())  # any answer shows that it is alive
        for event in events:
            if isinstance(event, RoundVerdict | PromptLogprobs):
                self._heard[link] = self._clock()
            running = self._sequences.get(event.sequence_id)
            if running is None:
                continue
            if link in running.drafts:
                self._handle(running, FromDraft(event, running.drafts.index(link)))
                continue
            if link is not running.target:
                continue
            self._handle(running, FromTarget(event) if isinstance(event, SequenceFailed) else event)
            if isinstance(event, RoundVerdict):
                self._try_suspects()
                if self._blocks.granted(running):
                    self._admit()

    async def sweep(self) -> None:
        """Check deadlines until cancelled. A queued sequence has no deadline."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._clock()
            self._try_suspects()
            self._suspects.keep_waiting(self.targets, now)
            for running in list(self._sequences.values()):
                deadline = running.state.deadline
                if running.admitted and deadline is not None and now >= deadline:
                    self._deadline_passed(running, deadline)
                behind = running.behind_since
                if behind is not None and running.read and now - behind >= self._unread_timeout:
                    self._cut(running)
            self.num_preemptions += self._blocks.sweep(now)
            self._admit()

    # ---- within ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._admission.admit(self._begin)

    def _begin(self, running: Running) -> None:
        self._handle(running, Signal.ADMITTED)
        self._assign(running)

    def _assign(self, running: Running) -> None:
        """Give a sequence the ready workers that it lacks; routing.py chooses the target.

        Drafts come first: the target's first round then finds that there are some.
        """
        wants_drafts = running.state.planner.num_speculative_tokens > 0
        for number, link in enumerate(running.drafts if wants_drafts else ()):
            if link is None and (draft := self._free_draft(running, number)) is not None:
                self._give_draft(running, number, draft)
        if running.target is None and self._suspects.holds_back(running):
            self._try_suspects()
        elif running.target is None and (target := self._nearest_target(running)) is not None:
            self._give_target(running, target)

    def _nearest_target(self, running: Running) -> Link | None:
        state = running.state
        return self._router.choose(self.targets, state.ledger.token_ids, state.params.cache_salt)

    def _remember(self, running: Running, target: Link) -> None:
        """Remember where the sequence's tokens are cached; with a single target there is no choice."""
        if len(self.targets) > 1:
            state = running.state
            self._router.sent(target, state.ledger.token_ids, state.params.cache_salt)

    def _hand_over(self) -> None:
        """Move the sequences of workers that are stopping to workers that are not, where there are any."""
        stopping = {link for link in self.leaving if link.draining and link.load}
        if not stopping:
            return
        for running in list(self._sequences.values()):
            for number, link in enumerate(running.drafts):
                if link in stopping and self._free_draft(running, number) is not None:
                    self._leave_draft(running, link)
            if running.target in stopping and any(link.ready for link in self.targets):
                self._leave_target(running)

    def _leave_draft(self, running: Running, link: Link) -> None:
        """Take a sequence from a live draft and give it another one."""
        self._handle(running, DraftLeft(running.drafts.index(link)))
        if not running.ended:
            self._take_draft(running, link)
            self._assign(running)

    @staticmethod
    def _take_draft(running: Running, link: Link) -> int:
        """Take a draft from a sequence. Returns its place among the sequence's drafts."""
        number = running.drafts.index(link)
        running.drafts[number] = None
        link.load -= 1
        return number

    def _give_draft(self, running: Running, number: int, link: Link) -> None:
        running.drafts[number] = link
        link.load += 1
        draft, known = running.state.drafts[number], link.known or common_pb2.WorkerInfo()
        draft.max_len, draft.max_nodes = known.max_model_len, known.max_tree_nodes
        draft.sub_drafted = bool(known.sub_drafter)
        self._handle(running, DraftReady(number))

    def _leave_target(self, running: Running) -> None:
        """Take a sequence from a live target and give it another one, which computes its prefix again."""
        link = running.target
        assert link is not None
        self._handle(running, Signal.TARGET_LEFT)
        if not running.ended:
            running.target = None
            link.load -= 1
            self._blocks.wake_oldest(link)
            self._assign(running)

    def _give_target(self, running: Running, target: Link) -> None:
        running.target = target
        target.load += 1
        self._remember(running, target)
        if target.known is not None:
            planner, known = running.state.planner, target.known
            planner.target_max_len, planner.target_max_nodes = known.max_model_len, known.max_tree_nodes
        self._handle(running, Signal.TARGET_READY)

    def _try_suspects(self) -> None:
        self._suspects.give_turns(self.targets, self._give_target)

    def _free_draft(self, running: Running, number: int) -> Link | None:
        """A draft for this place of a sequence: of a model that the others have not, then the least loaded.

        A draft that may hang gets a single sequence, to find out. Where the target decides, drafts of one
        model would propose the same: a further one of that model is not worth its time.
        """
        others = [link for i, link in enumerate(running.drafts) if link is not None and i != number]
        models = {_model_of(link) for link in others}

        def cost(link: Link) -> tuple[bool, bool, int, bool]:
            silence = self._silences[link]
            doubtful = silence.deadlines > 0 or silence.hang_ups > 0
            return _model_of(link) in models, doubtful and link.load > 0, link.load, doubtful

        free = [link for link in self.drafts if link.ready and link not in others]
        if running.state.params.target_decides:
            free = [link for link in free if _model_of(link) not in models]
        return min(free, key=cost, default=None)

    def _handle(self, running: Running, event: Event) -> None:
        begun = self._clock()
        try:
            actions = running.machine.handle(event, begun)
        except Exception:
            # A defect must not end the link, and with it every other sequence.
            log.exception("a sequence failed", extra=fields(sequence_id=running.state.sequence_id))
            actions = running.machine.give_up(InternalError("the coordinator failed"))
        self._carry_out(running, actions)
        running.state.times.coordinator += self._clock() - begun

    def _carry_out(self, running: Running, actions: Sequence[Action]) -> None:
        # Workers first: the next round is on its way while the client gets the last one.
        commit: Commit | None = None
        failure: PacelineError | None = None
        for action in actions:
            match action:
                case ToTarget(command):
                    if running.target is not None:
                        running.target.send(command)
                case ToDraft(command, number):
                    if (draft := running.drafts[number]) is not None:
                        draft.send(command)
                case Emit(emitted):
                    commit = emitted
                case Fail(error):
                    self.failed, running.error = self.failed + 1, error
                    failure = error
                case WaitForBlocks(error, preempted):
                    self.num_preemptions += preempted
                    tell_all(self._observers, lambda observer: observer.blocks_awaited())
                    if not self._blocks.refused(running, error, self._clock()):
                        self._carry_out(running, running.machine.give_up(error))
                case TargetHangs():
                    self._late(running)
        record, running.state.committed = running.state.committed, None
        if self._held is not None and not running.ended:
            self._held.append((running, commit, record))
            return
        self._release(self._held)
        self._tell_of(running, commit, record)
        if failure is not None:
            running.parts.put_nowait(failure)
        if running.ended:
            self._forget(running)

    def _release(self, held: Untold | None) -> None:
        while held:
            running, commit, record = held.popleft()
            begun = self._clock()
            self._tell_of(running, commit, record)
            running.state.times.coordinator += self._clock() - begun

    def _tell_of(self, running: Running, commit: Commit | None, record: RoundRecord | None) -> None:
        if commit is not None:
            self._emit(running, commit)
        if record is not None:
            if running.first_token_at is None:
                running.first_token_at = record.ended
            now = self._clock()
            tell_all(self._observers, lambda observer: observer.round_ended(running, record, now))
            running.last_token_at = record.ended

    def _emit(self, running: Running, commit: Commit) -> None:
        if running.replay is not None:
            running.replay.add(commit)
        running.unread += len(commit.token_ids)
        running.parts.put_nowait(commit)
        if commit.finish is not None:
            self.finished += 1
        elif running.unread > limits.MAX_UNREAD_TOKENS and running.behind_since is None:
            running.behind_since = self._clock()
            self._handle(running, Signal.CLIENT_BEHIND)

    def _deadline_passed(self, running: Running, deadline: float) -> None:
        """Tell the machine, and start the links of late drafts over that seem to hang.

        A draft that hangs loses all its sequences and is ready again once its engine answers. A draft that is
        late for this sequence alone is only paused, by the round machine.
        """
        late = [running.drafts[draft.index] for draft in running.state.drafts.awaited]
        self._handle(running, Signal.DEADLINE)
        sent_at = deadline - running.state.deadlines.draft
        for link in filter(None, late):
            if self._silences[link].is_too_long(sent_at, deadline):
                link.hang_up()

    def _late(self, running: Running) -> None:
        """A target did not answer in time. Find out whether it hangs.

        A target that answers other sequences is alive. Then this one stays, unless another target would be
        less loaded even with this sequence.
        """
        link = running.target
        if link is None:
            return
        silent = self._clock() - self._heard.get(link, -math.inf)
        if silent > STUCK_SHARE * running.state.deadlines.target:
            self._handle(running, Signal.TARGET_LOST)
            link.hang_up()
            return
        log.warning("the target worker at %s is late for one sequence", link.address)
        if all(other.load + 1 >= link.load for other in self.targets if other.ready):
            self._handle(running, Signal.TARGET_LATE)
            return
        self._leave_target(running)

    def _cut(self, running: Running) -> None:
        """End a sequence whose client does not read. Parts that are queued for the client stay."""
        self.abort(running, UnavailableError(UNREAD, running.state.ledger.num_generated - 1))

    def _forget(self, running: Running) -> None:
        if self._sequences.pop(running.state.sequence_id, None) is None:
            return
        self._suspects.forget(running)
        target = running.target
        for link in filter(None, (target, *running.drafts)):
            link.load -= 1
        running.target, running.drafts = None, [None] * len(running.drafts)
        self._admission.leave(running)
        tell_all(self._observers, lambda observer: observer.sequence_ended(running, self._clock()))
        if target is not None:
            self._remember(running, target)
            self._blocks.wake_oldest(target)
        self._try_suspects()
        self._admit()


def _model_of(link: Link) -> str:
    """Distinguishes the models of drafts; one without weights is known by its address."""
    fingerprint = link.known.model_fingerprint if link.known is not None else ""
    return fingerprint or link.address
