"""The common gRPC server of all processes: options, health, announcement, shutdown."""

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
"""Time for calls ended by the drain to send their last messages."""

HEARING_SECONDS = 1.0
"""Interval of checks that gRPC still accepts calls."""

KEEPALIVE_MS = 20_000

SWITCH_SECONDS = 0.0002
"""Switch interval between Python threads."""

SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    # Both equal, because between the two gRPC refuses at random.
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
    # Reconnect quickly to a restarted worker, which has the same address.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time limit of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def tune_interpreter() -> None:
    """Reduce the interpreter's overhead during rounds; call once after loading.

    Excludes all loaded objects (hundreds of thousands with torch) from garbage collection, and lets a thread
    with an answer to send interrupt the engine thread soon.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


def host_in_address(host: str) -> str:
    """The host as written before a port: IPv6 addresses in brackets."""
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
        """`tls` None is plain text. `interceptors` run before the server's own. With `secret`, every method
        except health requires it. `bounds` None means a worker's. `max_request_bytes` is a lower bound of
        requests that is only known later."""
        self.role = role
        self._tls = tls
        self._host = host_in_address(host)
        self._port = port
        self._stop = asyncio.Event()
        self.abandoned = False
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
        """host:port with the actual port; known after `start`."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind and serve. Raises UnavailableError if the port is in use, InvalidArgumentError naming an
        unusable TLS file."""
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
        """Set the health status of the process and each named service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *services):
            self._health.set(service, status)

    def reflect(self, service: str) -> None:
        """Enable server reflection for a service, health and reflection; call before `start`."""
        from grpc_reflection.v1alpha import reflection  # imported only if enabled

        reflection.enable_server_reflection(
            (service, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )

    def announce(self, **more: str) -> None:
        """Announce readiness to the parent process with one JSON line on standard output."""
        line = {"event": "ready", "role": self.role, "address": self.address, "pid": os.getpid(), **more}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def request_stop(self) -> None:
        """Begin the shutdown. Idempotent; call on the event loop's thread."""
        self._stop.set()

    def abandon(self) -> None:
        """Stop without draining, because running calls can no longer be served and should fail over at
        once."""
        self.abandoned = True
        self._stop.set()

    def heed_signals(self, *, exit_with_parent: bool) -> None:
        """Begin the shutdown on SIGTERM, SIGINT and, if enabled, the end of standard input.

        Call once, in the main thread and before the announcement, because its reader may send a signal at
        once.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, self.request_stop)
        if exit_with_parent:
            stop_with_parent(loop, self.request_stop)

    async def run_until_stopped(self, drain: Callable[[], Awaitable[object]]) -> None:
        """Serve until `request_stop`, by a heeded signal or otherwise; then refuse new calls.

        `drain()` returns when all running calls have ended or been told to end.

        Raises InternalError, with `abandoned` true, if gRPC has stopped accepting calls.
        """
        hears = await self._accepts_until_stopped()
        log.info("stopping")
        self._calls.close(f"the {self.role} is stopping")
        self._health.stop()
        if not hears:
            self.abandon()
            await self._end_calls()
            raise InternalError("gRPC no longer accepts calls")
        if self.abandoned:
            await self.grpc.stop(None)
            return
        await drain()
        # A stopping gRPC server cancels new calls without a message, so refuse them with a clear error first.
        await self._calls.all_ended(FAREWELL_SECONDS)
        await self.grpc.stop(FAREWELL_SECONDS)

    async def _accepts_until_stopped(self) -> bool:
        """Wait for the shutdown. False if gRPC stopped accepting calls before, which it does not report."""
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
