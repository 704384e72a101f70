"""The worker protocol by hand: one stream, commands and events; and a recording proxy."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from harness.secret import SECRET
from harness.waiting import HANG
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftRound,
    OpenSequence,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.rpc.streams import frames
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_names = itertools.count()


def params(prompt_length: int, mode: str = "coupled", **sampling: Any) -> SequenceParams:
    """What OpenSequence carries; greedy unless told otherwise."""
    values = {"temperature": 0.0, "seed": 1, "max_tokens": None} | sampling
    return SequenceParams(SamplingParams(**values), AcceptanceMode(mode), prompt_length)


class _ShowsSecret(grpc.StreamStreamClientInterceptor):
    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=SECRET.metadata), requests)


@contextlib.contextmanager
def channel_with_secret(address: str) -> Iterator[grpc.Channel]:
    """Whose bidirectional streams, such as those of reflection, show the workers' secret."""
    with grpc.insecure_channel(address) as channel:
        yield grpc.intercept_channel(channel, _ShowsSecret())


class Line:
    """A coordinator's stream to one worker, spoken by a test. Also counts what the worker has."""

    def __init__(self, address: str, role: str) -> None:
        self.role = role
        self.continuations: list[Continuations] = []
        self._channel = grpc.insecure_channel(address)
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if role == "target":
            self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
            self._call = self._stub.Verify(iter(self._out.get, None), metadata=SECRET.metadata)
        else:
            self._stub = draft_pb2_grpc.DraftServiceStub(self._channel)
            self._call = self._stub.Draft(iter(self._out.get, None), metadata=SECRET.metadata)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        parse: Callable[[Any], Sequence[Any]] = (
            frames.target_events if self.role == "target" else frames.draft_events
        )
        try:
            for frame in self._call:
                for event in parse(frame):
                    self._in.put(event)
        except grpc.RpcError as error:
            self._in.put(error)

    def send(self, *commands: Any) -> None:
        """One frame."""
        render = frames.verify_request if self.role == "target" else frames.draft_request
        self._out.put(render(commands))

    def send_frame(self, frame: Any) -> None:
        """A frame as it is."""
        self._out.put(frame)

    def receive(self) -> Any:
        """The next answer; raises queue.Empty when none comes. What nobody asked for is put aside."""
        while True:
            event = self._in.get(timeout=HANG)
            if isinstance(event, grpc.RpcError):
                raise event
            if not isinstance(event, Continuations):
                return event
            self.continuations.append(event)

    def wait_for_continuations(self, sequence_id: str) -> Continuations:
        """The branches that the draft pushes for a sequence, where no answer is due."""
        while True:
            event = self.continuations.pop(0) if self.continuations else self._in.get(timeout=HANG)
            assert isinstance(event, Continuations), event
            if event.sequence_id == sequence_id:
                return event

    def ask(self, *commands: Any) -> Any:
        """One frame, and the next event."""
        self.send(*commands)
        return self.receive()

    def refused(self, *commands: Any) -> Any:
        """The error a frame is answered with."""
        event = self.ask(*commands)
        assert isinstance(event, SequenceFailed), event
        return event.error

    def info(self) -> common_pb2.WorkerInfo:
        """What the worker says of itself now."""
        package = target_pb2 if self.role == "target" else draft_pb2
        name = f"{self.role.capitalize()}ServiceGetWorkerInfoRequest"
        request = getattr(package, name)()
        return self._stub.GetWorkerInfo(request, timeout=HANG, metadata=SECRET.metadata).info

    def used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        cache = self.info().cache
        return cache.total_blocks - cache.free_blocks

    def open(
        self,
        tokens: Sequence[int],
        epoch: int = 1,
        mode: str = "coupled",
        prompt: int | None = None,
        **sampling: Any,
    ) -> Seq:
        """Open a new sequence; the worker answers only if it refuses. `prompt` is the prompt's length."""
        sequence = Seq(self, f"by-hand-{next(_names)}-{id(self)}", epoch, list(tokens))
        self.send(
            OpenSequence(sequence.id, epoch, tuple(tokens), params(prompt or len(tokens), mode, **sampling))
        )
        return sequence

    def close(self) -> None:
        """End the stream."""
        self._out.put(None)
        self._reader.join(HANG)
        self._channel.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Seq:
    """One sequence of a line, with the ledger a coordinator would keep."""

    line: Line
    id: str
    epoch: int
    ledger: list[int]
    round: int = 0
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.known = len(self.ledger)

    def verify(
        self, proposal: Sequence[int] | Proposal = (), *, tail: int | None = None, **changes: Any
    ) -> VerifyRound:
        """The command of the next round; `tail` counts ledger tokens to send (None: those not sent yet)."""
        if not isinstance(proposal, Proposal):
            proposal = Proposal(tuple(proposal))
        return VerifyRound(**{**self._next(tail), "proposal": proposal, **changes})

    def draft(self, k: int, *, tail: int | None = None, **changes: Any) -> DraftRound:
        """The same for a draft worker."""
        return DraftRound(**{**self._next(tail), "num_draft_tokens": k, **changes})

    def _next(self, tail: int | None) -> dict[str, Any]:
        self.round += 1
        start = self.known if tail is None else len(self.ledger) - tail
        self.known = len(self.ledger)
        return {
            "sequence_id": self.id,
            "epoch": self.epoch,
            "round": self.round,
            "base_length": len(self.ledger),
            "committed_tail": tuple(self.ledger[start:]),
        }

    def step(self, proposal: Sequence[int] | Proposal = ()) -> Any:
        """One round with its verdict taken into the ledger, which the target knows as well."""
        event = self.line.ask(self.verify(proposal))
        assert not isinstance(event, SequenceFailed), event
        self.ledger.extend(event.verdict.token_ids)
        self.known = len(self.ledger)
        return event.verdict

    def end(self) -> None:
        """Close the sequence."""
        self.line.send(CloseSequence(self.id, self.epoch))


def next_round(sequence: Seq, **changes: Any) -> VerifyRound | DraftRound:
    """A valid next round for either worker."""
    if sequence.line.role == "target":
        return sequence.verify([5, 6, 7], **changes)
    return sequence.draft(3, **changes)


Frame = Any
Mangle = Callable[[Frame], Frame | None]
"""Changes a frame of events, or swallows it (None)."""


class Proxy:
    """Stands between a coordinator and one worker; records both directions, may change the answers."""

    def __init__(self, upstream: str, role: str) -> None:
        self.role = role
        self.commands: list[Any] = []
        self.events: list[Any] = []
        self.log: list[Any] = []
        """Commands and events in the order they passed."""
        self.mangle: Mangle = lambda frame: frame
        self.mangle_commands: Callable[[Any], Any] = lambda frame: frame
        self.describe: Callable[[common_pb2.WorkerInfo], common_pb2.WorkerInfo] = lambda info: info
        """What the worker says of itself, as this proxy passes it on."""
        self._lock = threading.Lock()
        self._calls: set[Any] = set()
        self._channel = grpc.insecure_channel(upstream)
        self._server = grpc.server(ThreadPoolExecutor(8))
        if role == "target":
            self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
            target_pb2_grpc.add_TargetServiceServicer_to_server(_TargetFace(self), self._server)
        else:
            self._stub = draft_pb2_grpc.DraftServiceStub(self._channel)
            draft_pb2_grpc.add_DraftServiceServicer_to_server(_DraftFace(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def info(self, request: Any) -> Any:
        """Passed on as of a worker of its own, without the way past this proxy."""
        response = self._stub.GetWorkerInfo(request, timeout=HANG, metadata=SECRET.metadata)
        response.info.local_socket, response.info.instance_id = "", self.address
        response.info.CopyFrom(self.describe(response.info))
        return response

    def carry(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Pass one stream on in both directions."""
        target = self.role == "target"
        parse_commands: Any = frames.target_commands if target else frames.draft_commands
        parse_events: Any = frames.target_events if target else frames.draft_events

        def passing() -> Iterator[Any]:
            with contextlib.suppress(grpc.RpcError):
                for frame in requests:
                    self._note(self.commands, parse_commands(frame))
                    yield self.mangle_commands(frame)

        call = (self._stub.Verify if target else self._stub.Draft)(passing(), metadata=SECRET.metadata)
        context.add_callback(call.cancel)
        self._calls.add(call)
        with contextlib.suppress(grpc.RpcError):
            for frame in call:
                changed = self.mangle(frame)
                if changed is not None:
                    self._note(self.events, parse_events(changed))
                    yield changed

    def hang_up(self) -> None:
        """End the streams that are open, as a worker that is replaced does."""
        while self._calls:
            self._calls.pop().cancel()

    def _note(self, where: list[Any], items: Sequence[Any]) -> None:
        with self._lock:
            where.extend(items)
            self.log.extend(items)

    def stop(self) -> None:
        """End everything."""
        self._server.stop(None).wait(HANG)
        self._channel.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Face:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._proxy.info(request)

    def _carry(self, request_iterator: Any, context: Any) -> Any:
        return self._proxy.carry(request_iterator, context)


class _TargetFace(_Face, target_pb2_grpc.TargetServiceServicer):
    Verify = _Face._carry


class _DraftFace(_Face, draft_pb2_grpc.DraftServiceServicer):
    Draft = _Face._carry
