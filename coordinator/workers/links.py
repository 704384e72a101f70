"""The connection to one worker: connects, checks the worker, exchanges frames, and reconnects.

A link reconnects until it is cancelled. Commands queued in one turn of the event loop are sent together, at
the end of the turn or at `flush`, in one frame unless they are too large. Frames go through gRPC, or through
the worker's local socket if the worker offers one that the coordinator can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coordinator.workers.stream_protocol import StreamProtocol
from paceline.core.errors import InvalidArgumentError, PacelineError, UnavailableError
from paceline.core.security.secret import WorkerSecret
from paceline.core.security.tls import Tls
from paceline.rpc.codec.drain import DrainCall
from paceline.rpc.codec.info import model_or_drafter
from paceline.rpc.codec.profile import ProfileCall
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.security.auth import PeerRole
from paceline.rpc.security.credentials import open_aio_channel
from paceline.rpc.server.server import CHANNEL_OPTIONS
from paceline.rpc.streams import unix_stream
from paceline.rpc.streams.frame_split import framed
from paceline.v1 import admin_pb2, admin_pb2_grpc, common_pb2

log = logging.getLogger(__name__)

INFO_SECONDS = 5.0
"""Time limit for a connected worker's description of itself."""
RECONNECT_SECONDS = 0.1
REFUSED_RETRY_SECONDS = 2.0
"""Seconds until a refused worker is tried again, since it may have been restarted with another model."""


class LinkState(enum.Enum):
    """State of a link."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"
    DRAINING = "draining"
    """Connected, but the worker says that it does not serve: it is stopping, or its engine is stuck."""


@dataclass(frozen=True, slots=True)
class LinkObserver:
    """Callbacks of a link, called on the event loop."""

    admit: Callable[[Link, common_pb2.WorkerInfo], None]
    """Checks the worker; raises PacelineError to refuse it."""
    ready: Callable[[Link], None]
    lost: Callable[[Link], None]
    events: Callable[[Link, Sequence[Any]], None]
    refused: Callable[[Link, str], None] = lambda _link, _refusal: None
    """Called with the reason if the worker cannot be used."""
    health: Callable[[Link], None] = lambda _link: None
    """Called when `draining` has changed."""


class Link:
    """The connection to the worker at one address."""

    def __init__(
        self,
        address: str,
        protocol: StreamProtocol,
        observer: LinkObserver,
        tls: Tls | None = None,
        *,
        local_sockets: bool = True,
        secret: WorkerSecret | None = None,
    ) -> None:
        """Create a link that is not connected yet.

        Args:
            tls: if set, the worker's certificate must name this link's role, and local sockets are not used,
                since they have no certificates.
            secret: sent with every call.
        """
        self.address = address
        self._local_sockets = local_sockets and tls is None
        self._tls = tls and replace(tls, server_name=PeerRole(protocol.role).dns_name)
        self._metadata = () if secret is None else secret.metadata
        self.protocol = protocol
        self.state = LinkState.CONNECTING
        self.reason = ""
        self.known: common_pb2.WorkerInfo | None = None
        """The worker's last description of itself, whether or not it was admitted."""
        self.admitted: common_pb2.WorkerInfo | None = None
        """The last admitted description. Requests are checked against it even while the worker is away."""
        self.instance_id = ""
        """Of the worker that it is connected to, from its admission on; empty without one."""
        self.load = 0
        """Sequences assigned to this worker."""
        self.settled = asyncio.Event()
        """Set from the first time that the worker is ready or refused."""
        self._observer = observer
        self._channel: grpc.aio.Channel | None = None
        self._asking: asyncio.Task[None] | None = None
        self._outbox: list[Any] = []
        self._pending = asyncio.Event()
        self._stream: Any = None

    @property
    def role(self) -> str:
        """`draft` or `target`."""
        return self.protocol.role

    @property
    def ready(self) -> bool:
        """True while the worker is connected and admitted."""
        return self.state in (LinkState.READY, LinkState.DRAINING)

    @property
    def draining(self) -> bool:
        """True while the connected worker says that it does not serve."""
        return self.state is LinkState.DRAINING

    def send(self, command: Any) -> None:
        """Queue a command for the next frame. It is dropped unless the worker is ready."""
        if self.ready:
            self._outbox.append(command)
            self._pending.set()

    def flush(self) -> None:
        """Send queued commands now instead of at the end of this turn of the event loop.

        This works for local streams only: writing a frame to gRPC must be awaited in a task.
        """
        if self._outbox and isinstance(self._stream, unix_stream.LocalStream):
            commands, self._outbox = self._outbox, []
            self._pending.clear()
            for frame in framed(commands, self.protocol.request):
                self._stream.send(frame.SerializeToString())

    async def profile(self, seconds: float) -> AsyncIterator[admin_pb2.ProfileResponse]:
        """A profile of the worker."""
        async with self._orders() as stub:
            async for part in stub.Profile(ProfileCall(seconds).to_proto(), metadata=self._metadata):
                yield part

    async def drain(self) -> admin_pb2.DrainResponse:
        """Let the worker hand its sequences over and stop."""
        async with self._orders() as stub:
            answer: admin_pb2.DrainResponse = await stub.Drain(
                DrainCall().to_proto(), metadata=self._metadata
            )
            return answer

    @contextlib.asynccontextmanager
    async def _orders(self) -> AsyncIterator[Any]:
        """The worker's admin service over a connection of its own: a worker that stops ends the link's
        before it has answered."""
        async with open_aio_channel(self.address, CHANNEL_OPTIONS, self._tls, "worker_tls") as channel:
            yield admin_pb2_grpc.AdminServiceStub(channel)

    def hang_up(self) -> None:
        """End the stream because the worker does not answer. The link then connects again."""
        if self._stream is not None:
            self._stream.cancel()

    async def refresh(self) -> common_pb2.WorkerInfo | None:
        """Ask the worker to describe itself now. Returns its last description if it does not answer.

        Concurrent calls share one question, since the engine answers one at a time.
        """
        if self.ready and self._channel is not None:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(self._channel))
            await asyncio.shield(self._asking)
        return self.known

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        try:
            self.known = await self.protocol.info(channel, INFO_SECONDS, self._metadata)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, DecodeError):
            pass
        except asyncio.CancelledError:
            # Closing a channel cancels its calls, which looks like a cancellation of this task.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise

    async def run(self) -> None:
        """Keep the worker connected until cancelled."""
        while True:
            try:
                # A new channel reaches a restarted worker at once; the old one may be in backoff.
                opened = open_aio_channel(self.address, CHANNEL_OPTIONS, self._tls, "worker_tls")
            except InvalidArgumentError as error:
                # The certificates may be in renewal. The status must not reveal the paths of the files.
                pause = self._refuse(error, f"{error.field} cannot be used")
            except OSError as error:
                self._end(str(error))
                pause = RECONNECT_SECONDS
            else:
                async with opened as channel:
                    self._channel = channel
                    pause = await self._session(channel)
            await asyncio.sleep(pause)

    async def _session(self, channel: grpc.aio.Channel) -> float:
        """Run one connection from beginning to end. Returns the seconds to wait before the next one."""
        try:
            info = self.known = await self.protocol.info(channel, INFO_SECONDS, self._metadata)
            self._observer.admit(self, info)
            self.admitted, self.instance_id = info, info.instance_id
            await self._converse(channel, info)
        except UnavailableError as error:
            # No target is known yet that this draft worker could be compared with.
            self._end(str(error), reached=True)
        except PacelineError as error:
            return self._refuse(error)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return self._refuse(from_rpc_error(error))
            self._end(self._told(error.code()))
        except DecodeError:
            self._end("it sends bytes that are not a message")
        except grpc.aio.UsageError:
            self._end("the stream broke")
        except OSError as error:
            # For example, the process has no descriptors left. That must not end the links to other workers.
            self._end(str(error))
        return RECONNECT_SECONDS

    def _refuse(self, error: PacelineError, reason: str = "") -> float:
        """Record that the worker cannot be used for now. Returns the seconds until the next attempt.

        `reason` replaces the error's text in the status, if that text must not be shown to clients.
        """
        was_ready = self.ready
        is_news = self.state is not LinkState.REFUSED
        self.state, self.reason = LinkState.REFUSED, reason or str(error)
        self.instance_id = ""
        if is_news:
            log.warning("the %s worker at %s is refused: %s", self.role, self.address, error)
            self._observer.refused(self, self.reason)
        self.settled.set()
        if was_ready:
            self._outbox.clear()
            self._stream = None
            self._observer.lost(self)
        return REFUSED_RETRY_SECONDS

    def _told(self, code: grpc.StatusCode) -> str:
        name = code.name.lower()
        if self._tls is None or self.known is not None:
            return name
        # gRPC reports a failed handshake like a worker that is not running.
        return f"{name}; its certificate must name {self._tls.server_name}, and it must accept ours"

    def _end(self, reason: str, *, reached: bool = False) -> None:
        was_ready, before = self.ready, self.reason
        self.state = LinkState.LOST if self.state is not LinkState.CONNECTING else LinkState.CONNECTING
        self.reason, self.instance_id = reason, ""
        self._outbox.clear()
        self._stream = None
        if was_ready:
            log.warning("the %s worker at %s is lost: %s", self.role, self.address, reason)
            self._observer.lost(self)
        elif not reached and reason != before:
            log.warning("cannot reach the %s worker at %s: %s", self.role, self.address, reason)
            self._observer.refused(self, f"it cannot be reached at {self.address}: {reason}")

    async def _converse(self, channel: grpc.aio.Channel, info: common_pb2.WorkerInfo) -> None:
        beside = await self._connect_locally(info)
        stream: Any = beside or self.protocol.open(channel, self._metadata)
        self._stream = stream
        self._outbox.clear()
        self.state, self.reason = LinkState.READY, ""
        self.settled.set()
        where = "" if beside is None else f", on this machine: frames go through {info.local_socket}"
        model = model_or_drafter(info)
        log.info("the %s worker at %s is ready with %s%s", self.role, self.address, model, where)
        self._observer.ready(self)
        tasks = [asyncio.create_task(self._write(stream)), asyncio.create_task(self._watch_health(channel))]
        try:
            if beside is not None:
                await beside.ended
            else:
                async for frame in stream:
                    self._observer.events(self, self.protocol.take(frame))
            self._end("it did not answer in time" if stream.cancelled() else "it ended the stream")
        except asyncio.CancelledError:
            # `hang_up` cancels the call, not this task.
            if not stream.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._end("it did not answer in time")
        finally:
            for task in tasks:
                task.cancel()
            if beside is not None:
                beside.close()

    async def _watch_health(self, channel: grpc.aio.Channel) -> None:
        """Follow the worker's own state for as long as it tells it."""
        try:
            async for draining in self.protocol.drains(channel):
                self._hear(draining=draining)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, DecodeError):
            pass  # the stream of rounds tells whether it is alive

    def _hear(self, *, draining: bool) -> None:
        if self.ready and draining != self.draining:
            self.state = LinkState.DRAINING if draining else LinkState.READY
            told = "does not serve now" if draining else "serves again"
            log.info("the %s worker at %s %s", self.role, self.address, told)
            self._observer.health(self)

    async def _connect_locally(self, info: common_pb2.WorkerInfo) -> unix_stream.LocalStream | None:
        if not self._local_sockets or not info.local_socket:
            return None

        def received(frame: bytes) -> None:
            self._observer.events(self, self.protocol.read(frame))

        return await unix_stream.connect(info.local_socket, info.instance_id, received, INFO_SECONDS)

    async def _write(self, stream: Any) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            if self._outbox:
                commands, self._outbox = self._outbox, []
                try:
                    for frame in framed(commands, self.protocol.request):
                        await stream.write(frame)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader sees the same error and reports it
