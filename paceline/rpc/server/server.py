"""What every Paceline server process does the same way: options, health, announcement, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.core import limits
from paceline.core.errors import InternalError, UnavailableError
from paceline.core.security.secret import WorkerSecret
from paceline.core.security.tls import Tls
from paceline.core.system.descriptors import connections
from paceline.rpc.security.auth import all_of, role_check, secret_check
from paceline.rpc.security.credentials import server_credentials
from paceline.rpc.server.error_guard import ShieldInterceptor
from paceline.rpc.server.health import Health
from paceline.rpc.server.parent_watch import stop_with_parent
from paceline.rpc.server.ports import PortBounds
from paceline.rpc.server.reading import Readings
from paceline.rpc.server.running_calls import RunningCalls
from paceline.rpc.server.safe_server import make_server, takes_calls

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0
"""How long calls that the end of the draining ended may take to tell their clients."""

HEARING_SECONDS = 1.0
"""How often it is looked at whether gRPC still takes calls."""

KEEPALIVE_MS = 20_000

SWITCH_SECONDS = 0.0002
"""How long one Python thread may keep another waiting."""

SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    # Between the two gRPC refuses at random: the bound is one bound.
    ("grpc.max_metadata_size", limits.MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", limits.MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers must never share a port by accident.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # A restarted worker is back on the same address: find it soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def tune_interpreter() -> None:
    """Keep the interpreter out of the way of a round; call once, when everything is loaded.

    What was loaded is not looked at by the garbage collector again: with torch imported that is hundreds
    of thousands of objects. And a thread that has an answer to send gets its turn soon, also while the
    engine thread goes on with other work.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


def host_in_address(host: str) -> str:
    """As it stands before a port: an IPv6 address in brackets, whether it was given with them or not."""
    return f"[{host}]" if ":" in host and "[" not in host else host


class Server:
    """A grpc.aio server with health, a bound port, and a shutdown that drains."""

    def __init__(
        self,
        role: str,
        host: str,
        port: int,
        *,
        tls: Tls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        secret: WorkerSecret | None = None,
        bounds: PortBounds | None = None,
        max_request_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`tls` None is plain text; `interceptors` stand before the one that every server has. With `secret`
        every method but health demands it. `bounds` None are those of a worker; `max_request_bytes` is for
        what they cannot know from the beginning."""
        self.role = role
        self._tls = tls
        self._host = host_in_address(host)
        self._port = port
        self._stop = asyncio.Event()
        self.abandoned = False
        self._heeds_signals = False
        checks = [role_check(role)] if tls is not None and tls.ca else []
        checks += [secret_check(secret)] if secret is not None else []
        self._calls = RunningCalls()
        bounds = bounds or PortBounds(connections=min(connections(1), limits.MAX_WORKER_CONNECTIONS))
        readings = Readings(bounds.message_bytes, max_request_bytes)
        shield = ShieldInterceptor(all_of(*checks, self._calls.check), self._calls.counted, readings)
        options = bounds.options | dict(SERVER_OPTIONS)
        self.grpc = make_server([*interceptors, shield], tuple(options.items()))
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    @property
    def address(self) -> str:
        """host:port clients can reach; known after `start`."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind and serve. Raises UnavailableError when the port is taken, InvalidArgumentError naming a TLS
        file that cannot be used."""
        credentials = None if self._tls is None else server_credentials(self._tls)
        try:
            if credentials is None:
                self._port = self.grpc.add_insecure_port(self.address)
            else:
                self._port = self.grpc.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {self.address}") from error
        await self.grpc.start()

    async def set_serving(self, serving: bool, services: Sequence[str] = ()) -> None:
        """Tell health checks whether work is welcome, for the process and each named service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *services):
            self._health.set(service, status)

    def reflect(self, service: str) -> None:
        """Describe a service, health and reflection itself to whoever asks; before `start`."""
        from grpc_reflection.v1alpha import reflection  # a process without it does not load it

        reflection.enable_server_reflection(
            (service, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )

    def announce(self, **more: str) -> None:
        """One JSON line on standard output: whoever started this process may use it now."""
        line = {"event": "ready", "role": self.role, "address": self.address, "pid": os.getpid(), **more}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def request_stop(self) -> None:
        """Begin the shutdown; safe to call more than once, on the event loop's thread."""
        self._stop.set()

    def abandon(self) -> None:
        """Stop without draining: calls that run can no longer be served, and should go elsewhere at once."""
        self.abandoned = True
        self._stop.set()

    def heed_signals(self, *, exit_with_parent: bool) -> None:
        """From now on SIGTERM, SIGINT or, if asked for, the end of standard input ask for the shutdown.

        Called before the announcement: whoever reads it may send a signal at once.
        """
        if self._heeds_signals:
            return
        self._heeds_signals = True
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, self.request_stop)
        if exit_with_parent:
            stop_with_parent(loop, self.request_stop)

    async def run_until_stopped(
        self, *, exit_with_parent: bool, drain: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve until SIGTERM, SIGINT or, if asked for, the end of standard input; then refuse new calls.

        `drain()` returns when those that run have been told to end, or have ended.

        Raises InternalError, with `abandoned` true, when gRPC itself has stopped taking calls.
        """
        self.heed_signals(exit_with_parent=exit_with_parent)
        hears = await self._hears_until_stopped()
        log.info("stopping")
        self._calls.close(f"the {self.role} is stopping")
        self._health.stop()
        if not hears:
            self.abandon()
            await self._end_calls()
            raise InternalError("gRPC takes no calls any more")
        if self.abandoned:
            await self.grpc.stop(None)
            return
        await drain()
        # While gRPC stops, it cancels new calls without a word. Until the old ones have ended, ours refuses
        # them.
        await self._calls.all_ended(FAREWELL_SECONDS)
        await self.grpc.stop(FAREWELL_SECONDS)

    async def _hears_until_stopped(self) -> bool:
        """Whether gRPC took calls until the shutdown was asked for. When it stops it tells nobody."""
        while not self._stop.is_set():
            if not takes_calls(self.grpc):
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARING_SECONDS):
                    await self._stop.wait()
        return True

    async def _end_calls(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.grpc.stop(None)
