"""The asyncio shell around the round machines: it carries out their actions and brings back events.

This module decides when a deadline has passed. Which sequences wait for a place is decided in admission.py,
which workers they use in assignment.py, which wait for blocks in block_waiters.py, and what a sequence does
about each event in coordinator/round/.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

from coordinator.round.machine import RoundMachine
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.assignment import Assignment
from coordinator.scheduling.block_waiters import Blocks
from coordinator.scheduling.observer import SequenceObserver, tell_all
from coordinator.scheduling.running_sequence import UNREAD, Parts, Running, Untold
from coordinator.sequence.ledger import Commit
from coordinator.sequence.messages import (
    Action,
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
from paceline.core.messages import RoundVerdict, SequenceFailed
from paceline.telemetry.logs import fields

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.05
"""Seconds between two checks of the deadlines."""


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
        self.workers = Assignment(self._sequences, self._blocks, self._handle, clock)
        self._submitted = 0
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
        """The worker gets sequences from now on, or once it is ready."""
        self.workers.enter(link)

    def link_leaving(self, link: Link) -> None:
        """The worker gets no new sequences. If it is stopping, others take its present ones."""
        self.workers.withdraw(link)

    def link_left(self, link: Link) -> None:
        """Nobody has to do with the worker any more."""
        self.workers.forget(link)

    # ---- for the links -----------------------------------------------------------------------------

    def link_ready(self, link: Link) -> None:
        """A worker is ready: sequences without a worker of its role take it, suspects last."""
        self.workers.ready()

    def link_lost(self, link: Link) -> None:
        """A worker is lost: its sequences are told, then move to another worker if there is one."""
        self.workers.router.forget(link)
        for running in list(self._sequences.values()):
            if (told := self.workers.take_lost(running, link)) is not None:
                tell_all(self._observers, lambda observer: observer.worker_lost(link.role))
                self._handle(running, told)
            self.workers.assign(running)

    def link_events(self, link: Link, events: Sequence[Any]) -> None:
        """Process a worker's answers. The rounds that follow are sent before clients are told."""
        held = self._held = Untold()
        try:
            self._take_up(link, events)
            for each in self.workers.links:
                each.flush()
        finally:
            self._held = None
            self._release(held)

    def _take_up(self, link: Link, events: Sequence[Any]) -> None:
        self.workers.heard(link, events)
        for event in events:
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
                self.workers.try_suspects()
                if self._blocks.granted(running):
                    self._admit()

    async def sweep(self) -> None:
        """Check deadlines until cancelled. A queued sequence has no deadline."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._clock()
            self.workers.sweep(now)
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
        self.workers.assign(running)

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
                    self.workers.target_late(running)
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
        """Tell the machine, and the assignment which drafts are late."""
        late = [running.drafts[draft.index] for draft in running.state.drafts.awaited]
        self._handle(running, Signal.DEADLINE)
        sent_at = deadline - running.state.deadlines.draft
        self.workers.drafts_late(filter(None, late), sent_at, deadline)

    def _cut(self, running: Running) -> None:
        """End a sequence whose client does not read. Parts that are queued for the client stay."""
        self.abort(running, UnavailableError(UNREAD, running.state.ledger.num_generated - 1))

    def _forget(self, running: Running) -> None:
        if self._sequences.pop(running.state.sequence_id, None) is None:
            return
        target = self.workers.release(running)
        self._admission.leave(running)
        tell_all(self._observers, lambda observer: observer.sequence_ended(running, self._clock()))
        if target is not None:
            self._blocks.wake_oldest(target)
        self.workers.try_suspects()
        self._admit()
