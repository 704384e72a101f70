"""The connection to one worker: found, checked, streamed to, lost, and found again.

A link reconnects for as long as the coordinator lives. Commands queued in one turn of the event loop
leave in one frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.messages import DraftCommand, DraftEvent, TargetCommand, TargetEvent
from paceline.core.tls import Tls
from paceline.rpc import frames
from paceline.rpc.auth import PeerRole
from paceline.rpc.credentials import open_aio_channel
from paceline.rpc.server import CHANNEL_OPTIONS
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

INFO_SECONDS = 5.0
"""How long a worker may take to say what it is, once it is connected."""
RETRY_SECONDS = 0.1
REFUSED_RETRY_SECONDS = 2.0
"""A refused worker is asked again now and then: somebody may restart it with another model."""


class LinkState(enum.Enum):
    """Where a link stands."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"


class Dialect(Protocol):
    """What differs between talking to a draft worker and to a target worker."""

    @property
    def role(self) -> str:
        """`draft` or `target`."""

    async def info(self, channel: grpc.aio.Channel, seconds: float) -> common_pb2.WorkerInfo:
        """Ask the worker what it is."""

    def open(self, channel: grpc.aio.Channel) -> Any:
        """The bidirectional stream."""

    def request(self, commands: Sequence[Any]) -> Any:
        """A frame of commands."""

    def events(self, frame: Any) -> Sequence[Any]:
        """The events of a frame."""


class TargetDialect:
    """Verify streams."""

    role = "target"

    async def info(self, channel: grpc.aio.Channel, seconds: float) -> common_pb2.WorkerInfo:
        """Ask the worker what it is."""
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = target_pb2.TargetServiceGetWorkerInfoRequest()
        return (await stub.GetWorkerInfo(request, timeout=seconds, wait_for_ready=True)).info

    def open(self, channel: grpc.aio.Channel) -> Any:
        """The bidirectional stream."""
        return target_pb2_grpc.TargetServiceStub(channel).Verify()

    def request(self, commands: Sequence[TargetCommand]) -> target_pb2.VerifyRequest:
        """A frame of commands."""
        return frames.verify_request(commands)

    def events(self, frame: target_pb2.VerifyResponse) -> Sequence[TargetEvent]:
        """The events of a frame."""
        return frames.target_events(frame)


class DraftDialect:
    """Draft streams."""

    role = "draft"

    async def info(self, channel: grpc.aio.Channel, seconds: float) -> common_pb2.WorkerInfo:
        """Ask the worker what it is."""
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        request = draft_pb2.DraftServiceGetWorkerInfoRequest()
        return (await stub.GetWorkerInfo(request, timeout=seconds, wait_for_ready=True)).info

    def open(self, channel: grpc.aio.Channel) -> Any:
        """The bidirectional stream."""
        return draft_pb2_grpc.DraftServiceStub(channel).Draft()

    def request(self, commands: Sequence[DraftCommand]) -> draft_pb2.DraftRequest:
        """A frame of commands."""
        return frames.draft_request(commands)

    def events(self, frame: draft_pb2.DraftResponse) -> Sequence[DraftEvent]:
        """The events of a frame."""
        return frames.draft_events(frame)


@dataclass(frozen=True, slots=True)
class LinkObserver:
    """Whom a link tells what; all calls happen on the event loop."""

    admit: Callable[[Link, common_pb2.WorkerInfo], None]
    """Raises PacelineError to refuse the worker."""
    ready: Callable[[Link], None]
    lost: Callable[[Link], None]
    events: Callable[[Link, Sequence[Any]], None]


class Link:
    """One worker, by address."""

    def __init__(
        self, address: str, dialect: Dialect, observer: LinkObserver, tls: Tls | None = None
    ) -> None:
        """With `tls` only a worker whose certificate names this link's role is talked to, wherever it is."""
        self.address = address
        self._tls = tls and replace(tls, server_name=PeerRole(dialect.role).dns_name)
        self.dialect = dialect
        self.state = LinkState.CONNECTING
        self.reason = ""
        self.known: common_pb2.WorkerInfo | None = None
        self.load = 0
        """Sequences assigned to this worker."""
        self.settled = asyncio.Event()
        """Set once the worker was ready or refused for the first time."""
        self._observer = observer
        self._channel: grpc.aio.Channel | None = None
        self._outbox: list[Any] = []
        self._pending = asyncio.Event()
        self._stream: Any = None

    @property
    def role(self) -> str:
        """`draft` or `target`."""
        return self.dialect.role

    @property
    def ready(self) -> bool:
        """True while commands reach the worker."""
        return self.state is LinkState.READY

    def send(self, command: Any) -> None:
        """Queue a command for the next frame; dropped while the worker is not there."""
        if self.ready:
            self._outbox.append(command)
            self._pending.set()

    def hang_up(self) -> None:
        """Give the stream up: the worker does not answer. The link then starts over."""
        if self._stream is not None:
            self._stream.cancel()

    async def refresh(self) -> common_pb2.WorkerInfo | None:
        """Ask the worker for its numbers now; what it last said if it does not answer."""
        if self.ready and self._channel is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                self.known = await self.dialect.info(self._channel, INFO_SECONDS)
        return self.known

    async def run(self) -> None:
        """Keep the worker connected until cancelled."""
        while True:
            # A fresh channel finds a restarted worker at once, without the old one's backoff.
            async with open_aio_channel(self.address, CHANNEL_OPTIONS, self._tls) as channel:
                self._channel = channel
                pause = await self._session(channel)
            await asyncio.sleep(pause)

    async def _session(self, channel: grpc.aio.Channel) -> float:
        """One connection, from first contact to its end. Returns seconds to wait before the next."""
        try:
            self.known = await self.dialect.info(channel, INFO_SECONDS)
            self._observer.admit(self, self.known)
            await self._converse(channel)
        except UnavailableError as error:
            # Nothing is wrong with the worker: what it must be compared with is not there yet.
            self._end(str(error))
        except PacelineError as error:
            if self.state is not LinkState.REFUSED:
                log.warning("the %s worker at %s is refused: %s", self.role, self.address, error)
            self.state, self.reason = LinkState.REFUSED, str(error)
            self.settled.set()
            return REFUSED_RETRY_SECONDS
        except grpc.aio.AioRpcError as error:
            self._end(self._told(error.code()))
        except grpc.aio.UsageError:
            self._end("the stream broke")
        return RETRY_SECONDS

    def _told(self, code: grpc.StatusCode) -> str:
        name = code.name.lower()
        if self._tls is None or self.known is not None:
            return name
        # A handshake that fails looks like a worker that is not there yet.
        return f"{name}; its certificate must name {self._tls.server_name}, and ours suit it"

    def _end(self, reason: str) -> None:
        was_ready, before = self.ready, self.reason
        self.state = LinkState.LOST if self.state is not LinkState.CONNECTING else LinkState.CONNECTING
        self.reason = reason
        self._outbox.clear()
        self._stream = None
        if was_ready:
            log.warning("the %s worker at %s is lost: %s", self.role, self.address, reason)
            self._observer.lost(self)
        elif self._tls is not None and reason != before:
            log.warning("the %s worker at %s is not reached: %s", self.role, self.address, reason)

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        self._stream = stream = self.dialect.open(channel)
        self._outbox.clear()
        self.state, self.reason = LinkState.READY, ""
        self.settled.set()
        log.info("the %s worker at %s is ready", self.role, self.address)
        self._observer.ready(self)
        writer = asyncio.create_task(self._write(stream))
        try:
            async for frame in stream:
                self._observer.events(self, self.dialect.events(frame))
            self._end("it ended the stream")
        except asyncio.CancelledError:
            # Our own hang_up cancels the call, not this task.
            if not stream.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._end("it did not answer in time")
        finally:
            writer.cancel()

    async def _write(self, stream: Any) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            if self._outbox:
                commands, self._outbox = self._outbox, []
                try:
                    await stream.write(self.dialect.request(commands))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader sees the same end, and tells
