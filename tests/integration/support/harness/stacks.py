"""A running stack with a client, raw stubs, and checks of pools and logs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from harness.log import Log
from harness.pair import Pair
from harness.secret import ENVIRONMENT
from harness.waiting import HANG, until
from paceline.client import Client, GenerationResult, WorkerState, WorkerStatus
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig, WorkerConfig
from paceline.core.errors import UnavailableError
from paceline.supervisor import (
    ChildSpec,
    RestartBackoff,
    Stack,
    StackConfig,
    Supervisor,
    arguments,
    discard,
    serve_stack,
)
from paceline.supervisor.stack import PROGRAM
from paceline.v1 import generation_pb2_grpc

T = TypeVar("T")
NEVER = RestartBackoff(initial=HANG, maximum=HANG)
"""Of a supervisor: whatever dies stays so while the test lasts."""


@dataclass
class RunningStack:
    """One stack and a client of it."""

    stack: Stack
    client: Client
    log: Log
    pair: Pair

    @property
    def address(self) -> str:
        """The coordinator's."""
        return self.stack.address

    @contextlib.contextmanager
    def stub(self) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
        """The raw service, with no SDK between."""
        with grpc.insecure_channel(self.address) as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)

    def worker(self, role: str) -> WorkerStatus:
        """The coordinator's view of the one worker of a role."""
        return next(w for w in self.client.status().workers if w.role == role)

    def wait_for_worker(self, role: str, state: WorkerState = WorkerState.READY) -> WorkerStatus:
        """Until the coordinator sees the worker so."""

        def is_so() -> bool:
            # The coordinator itself may be away just now.
            with contextlib.suppress(UnavailableError):
                return self.worker(role).state is state
            return False

        until(is_so, f"the {role} worker being {state.value}")
        return self.worker(role)

    def wait_until_ready(self) -> None:
        """Until the coordinator sees both workers ready."""
        for role in ("target", "draft"):
            self.wait_for_worker(role)

    @contextlib.contextmanager
    def standing_target(self) -> Iterator[None]:
        """The target stands still while the block lasts: no request ends."""
        stopped = self.stack.kill("target", signal.SIGSTOP)
        try:
            yield
        finally:
            # Whoever was killed meanwhile is another process now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)

    def check_pools_whole(self) -> None:
        """Once nothing runs, no block and no sequence is left on any worker that is there."""

        def whole() -> bool:
            status = self.client.status()
            caches = [
                w.info.cache for w in status.workers if w.info is not None and w.state is WorkerState.READY
            ]
            return (status.coordinator.running, status.coordinator.waiting) == (0, 0) and all(
                cache.free_blocks == cache.total_blocks and cache.sequences == 0 for cache in caches
            )

        try:
            until(whole, "whole pools", timeout=30.0)
        except TimeoutError:
            status = self.client.status()
            left = {w.role: w.info.cache for w in status.workers if w.info is not None}
            raise AssertionError(f"something is left behind: {status.coordinator}, {left}") from None

    def num_finished(self) -> int:
        """Requests that came to their own end."""
        return self.client.status().coordinator.finished_requests

    def check_cut_short(self, num_finished: int) -> None:
        """What was given up ends soon, and before it would have by itself: no more than these finished."""

        def idle() -> bool:
            return self.client.status().coordinator.running == 0

        # Less than the coordinator waits for a client that does not read, or that may come back.
        until(idle, "the end of what was given up", timeout=10.0)
        assert self.num_finished() == num_finished
        self.check_pools_whole()

    def check_logs(self) -> None:
        """No process has seen an exception that it did not expect."""
        lines = list(self.log.lines)
        # Bytes that are no message are refused by gRPC itself, which logs them.
        expected = "Unexpected [DecodeError] raised by servicer method"
        at = next((i for i, x in enumerate(lines) if "Traceback" in x and expected not in lines[i - 1]), None)
        assert at is None, "\n".join(lines[max(0, at - 3) : at + 40])

    def good_request(self) -> GenerationResult:
        """The server goes on serving."""
        result = self.client.generate([5, 6, 7], {"max_tokens": 3, "temperature": 0}, timeout=HANG)
        assert len(result.token_ids) in range(1, 4)
        return result


def stack_config(pair: Pair, **changes: Any) -> StackConfig:
    """One thread a process, pools small enough to see a leak, ports that are free."""
    values: dict[str, Any] = {
        "target_model": str(pair.target),
        "target_threads": 1,
        "target_device": "cpu",
        "num_blocks": 1024,
        "block_size": 16,
        "start_timeout": 300.0,
        "environment": ENVIRONMENT,
    }
    of_draft: dict[str, Any] = {
        "draft_model": str(pair.draft),
        "draft_threads": 1,
        "draft_device": "cpu",
        # Also where two cores would leave drafting ahead off.
        "lookahead_branches": 8,
    }
    has_draft = changes.get("draft_model", pair.draft) is not None
    return StackConfig(**(values | (of_draft if has_draft else {}) | changes))


@contextlib.contextmanager
def running_stack(pair: Pair, **changes: Any) -> Iterator[RunningStack]:
    """A stack of one's own; every process of it has ended when the block has."""
    log = Log()
    config = stack_config(pair, **changes)
    with serve_stack(config, sink=log) as stack, Client(stack.address) as client:
        yield RunningStack(stack, client, log, pair)


@contextlib.contextmanager
def sound_stack(pair: Pair, **changes: Any) -> Iterator[RunningStack]:
    """The same; in the end its pools are whole and its logs clean."""
    with running_stack(pair, **changes) as running:
        yield running
        running.check_pools_whole()
        running.check_logs()


def together(calls: Sequence[Callable[[], T]], at_once: int = 16) -> list[T]:
    """Run calls in threads, `at_once` of them; results in order, the first error raised."""
    if at_once == 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(at_once) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def process(role: str, command: str, config: WorkerConfig | CoordinatorConfig) -> ChildSpec:
    """One process of Paceline, as the supervisor starts it."""
    return ChildSpec(
        role=role,
        command=(*PROGRAM, command, *arguments(config)),
        port=config.port,
        environment={**os.environ, **ENVIRONMENT},
    )


@dataclass
class OwnCoordinator:
    """A coordinator beside the shared one; it has no model and starts quickly."""

    client: Client
    address: str
    log: Log
    supervisor: Supervisor


@contextlib.contextmanager
def own_coordinator(
    pair: Pair,
    targets: Sequence[str],
    drafts: Sequence[str] = (),
    backoff: RestartBackoff | None = None,
    **changes: Any,
) -> Iterator[OwnCoordinator]:
    """A coordinator of the given workers, in its own process."""
    config = CoordinatorConfig(
        targets=tuple(targets),
        drafts=tuple(drafts),
        tokenizer=str(pair.target),
        exit_with_parent=True,
        **changes,
    )
    log = Log()
    with Supervisor(sink=log, backoff=backoff) as supervisor:
        (status,) = supervisor.start([process("coordinator", "coordinator", config)], 300.0)
        with Client(status.address) as client:
            yield OwnCoordinator(client, status.address, log, supervisor)


@contextlib.contextmanager
def own_worker(role: str, model: Path, log: Log | None = None, **changes: Any) -> Iterator[str]:
    """One more worker; its address."""
    values: dict[str, Any] = {"threads": 1, "num_blocks": 64, "device": "cpu"}
    cls = TargetConfig if role == "target" else DraftConfig
    config = cls(model=str(model), exit_with_parent=True, **(values | changes))
    with Supervisor(sink=log or discard) as supervisor:
        (status,) = supervisor.start([process(role, f"{role}-worker", config)], 300.0)
        yield status.address
