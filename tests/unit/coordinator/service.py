"""A dispatcher whose links are fakes."""

from __future__ import annotations

from typing import Any

import pytest

import coordinator.scheduling.dispatcher as dispatcher_module
from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit
from coordinator.sequence.messages import Phase
from paceline.core.clock import ManualClock
from paceline.core.errors import PacelineError, ResourceExhaustedError
from paceline.core.messages import DraftProposal, RoundVerdict, SequenceFailed, VerifyAhead
from paceline.core.types import Proposal, Verdict
from paceline.v1 import common_pb2
from tests.unit.coordinator.machines import make_machine

FULL = ResourceExhaustedError("no blocks")
THEIRS = ResourceExhaustedError("no blocks", retry_after=1.0)
"""What a worker says where others hold blocks, whoever's they are."""


class FakeLink:
    """Keeps what is sent."""

    def __init__(self, role: str = "target", *, ready: bool = True, max_model_len: int = 50) -> None:
        self.role = role
        self.ready = ready
        self.load = 0
        self.draining = False
        self.known = common_pb2.WorkerInfo(max_model_len=max_model_len)
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

    @property
    def types(self) -> list[type]:
        """Of the commands sent, but for "the next round is plain" (test_rounds_ahead.py has these)."""
        plain = [c for c in self.sent if isinstance(c, VerifyAhead) and c.plain_otherwise]
        return [type(command) for command in self.sent if command not in plain]

    def sent_to(self, running: Running) -> list[Any]:
        return [command for command in self.sent if command.sequence_id == running.state.sequence_id]


class Service:
    """A dispatcher with one target unless told otherwise."""

    def __init__(
        self, targets: int = 1, drafts: int = 0, max_running: int = 10, max_waiting: int = 10, **more: float
    ) -> None:
        self.clock = ManualClock()
        self.it: Any = Dispatcher(max_running, max_waiting, self.clock, **more)
        self.targets = [FakeLink() for _ in range(targets)]
        self.drafts = [FakeLink("draft") for _ in range(drafts)]
        self.it.workers.targets = list(self.targets)
        self.it.workers.drafts = list(self.drafts)
        self.count = 0

    @property
    def target(self) -> FakeLink:
        """The first one."""
        return self.targets[0]

    def submit(self, k: int = 3, max_tokens: int = 20, drafts: int = 1) -> Any:
        self.count += 1
        options = {"max_model_len": 50, "max_tokens": max_tokens, "drafts": drafts}
        machine = make_machine((1, 2), k, name=f"s{self.count}", deadline=100.0, **options)
        machine.state.planner.takes_trees = drafts > 1
        return self.it.submit(machine)

    def begin(self, count: int, k: int = 3, max_tokens: int = 20) -> list[Any]:
        return [self.submit(k, max_tokens) for _ in range(count)]

    @property
    def counts(self) -> tuple[int, int]:
        """Of running and of waiting sequences."""
        return self.it.running, self.it.waiting

    def at(self, now: float) -> None:
        """The clock is set, and deadlines are checked."""
        self.clock.now = now
        self.sweep()

    def after(self, seconds: float) -> None:
        self.at(self.clock.now + seconds)

    def sweep(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatcher_module, "SWEEP_SECONDS", 0)
            sweep = self.it.sweep()
            sweep.send(None)
            sweep.send(None)
            sweep.close()

    def answer(self, running: Running, *token_ids: int) -> None:
        self.it.link_events(running.target, [verdict_of(running, *token_ids)])

    def propose(self, running: Running, *, of_round: int = 0, draft: int = 0) -> None:
        """Three tokens, for the round in progress or an earlier one."""
        state = running.state
        number, base = of_round or state.round, len(state.ledger)
        proposal = Proposal((7, 8, 9))
        event = DraftProposal(state.sequence_id, state.drafts[draft].epoch, number, base, proposal, base + 2)
        self.it.link_events(running.drafts[draft], [event])

    def draft_round(self, *runnings: Running) -> None:
        """Each goes on until it waits for its draft; its target answers at once."""
        for running in runnings:
            while running.state.phase is Phase.VERIFYING:
                self.answer(running, 5)
            assert running.state.phase is Phase.DRAFTING

    def deadline(self, *runnings: Running) -> None:
        """Their draft lets one pass: a second."""
        self.draft_round(*runnings)
        self.after(1.0)

    def fail(self, *runnings: Running, error: PacelineError = FULL) -> None:
        """One frame in which all of them fail."""
        self.it.link_events(runnings[0].target, [failure_of(running, error) for running in runnings])

    def lose(self, link: Any) -> None:
        link.ready = False
        self.it.link_lost(link)

    def ready(self, link: Any) -> None:
        link.ready = True
        self.it.link_ready(link)

    def start_over(self, link: Any) -> None:
        """What a link does that is hung up, where the worker says at once what it is."""
        self.lose(link)
        self.ready(link)


def verdict_of(running: Running, *token_ids: int) -> RoundVerdict:
    """Of the round in progress."""
    state = running.state
    verdict = Verdict(len(token_ids) - 1, token_ids, len(state.ledger) + len(token_ids) - 1)
    return RoundVerdict(state.sequence_id, state.target.epoch, state.round, verdict)


def failure_of(running: Running, error: PacelineError) -> SequenceFailed:
    state = running.state
    return SequenceFailed(state.sequence_id, state.target.epoch, state.round, error)


def phases(*runnings: Running) -> list[Phase]:
    return [running.state.phase for running in runnings]


def parts(running: Running) -> list[Any]:
    """What the client can read, taken away."""
    return [running.parts.get_nowait() for _ in range(running.parts.qsize())]


def told(running: Running) -> list[Any]:
    """The same in short: the tokens of each commit, and the type of an error."""
    return [part.token_ids if isinstance(part, Commit) else type(part) for part in parts(running)]


def read(service: Service, running: Running) -> Commit | PacelineError:
    try:
        service.it.next_part(running).send(None)
    except StopIteration as result:
        part: Commit | PacelineError = result.value
        return part
    raise AssertionError("there was nothing to read")
