"""The HTTP server: uvicorn in the event loop of the gRPC server, with limits on client input."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from coordinator.api.http.server import request_head
from coordinator.api.http.server.encoding import ABORT_CONNECTION, WATCH
from coordinator.api.http.server.guard import NAMES
from coordinator.api.http.server.request_parser import RequestParser
from coordinator.api.http.server.stalled_client import Taking
from paceline.core import limits
from paceline.core.errors import UnavailableError
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import check_files
from paceline.rpc.security.renewal import Renewed
from paceline.rpc.server.server import host_in_address

HEAD_SECONDS = 10.0
"""Time limit for the request line and headers."""
KEEP_ALIVE_SECONDS = 75
"""Idle time of a connection between two requests: longer than common proxies and pools keep one open."""


_CLOSES = b"connection: close\r\ncontent-length: 0\r\n\r\n"
"""Headers of a final answer without a body."""


class _Flow(FlowControl):
    """Reports when a connection is read again."""

    def __init__(self, transport: asyncio.Transport, read_again: Callable[[], None]) -> None:
        super().__init__(transport)
        self._read_again = read_again

    def resume_reading(self) -> None:
        paused = self.read_paused
        super().resume_reading()
        if paused:
            self._read_again()


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits on size and time.

    Request heads are limited in size and time. Trailers and the lines between chunks are limited in size.
    Idle time is limited, and so is the time in which a client takes none of a finished answer.

    At any time the connection waits for a head, for its next request, or for an answer in progress.
    """

    def __init__(self, *args: Any, unread_timeout: float, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._unread_timeout = unread_timeout
        self._taking: Taking | None = None
        self.parser: RequestParser = RequestParser(self)
        self._in_head = True
        self._unfinished_bytes = 0
        """Bytes of an unfinished head, of trailers or of a line between chunks."""
        self._nothing_ended = True
        """True if all bytes being parsed belong to that unfinished part."""
        self._certificate_names: list[str] = []
        self._head_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered. `cycle` is the latest request, which may wait for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._max_connections:
            self.transport = transport
            transport.write(STATUS_LINE[503] + _CLOSES)
            transport.close()
            return
        self._taking = Taking(transport, self._unread_timeout)
        super().connection_made(cast(asyncio.Transport, self._taking))
        self.flow = _Flow(transport, self._is_read_again)
        self._certificate_names = _certificate_names(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._taking is not None:
            self._taking.stop()
        super().connection_lost(exc)
        # uvicorn notifies only `cycle`.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        assert self._taking is not None
        self.scope["state"] |= {
            NAMES: self._certificate_names,
            ABORT_CONNECTION: self.transport.abort,
            WATCH: self._taking.watch,
        }
        self._in_head, self._unfinished_bytes = True, 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        # No answer depends on trailers, and uvicorn would treat them as headers.
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._something_ended()
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """The chunk's line ends here. Only trailers follow the line of the last chunk."""
        self._something_ended()

    def on_chunk_complete(self) -> None:
        """Another chunk line follows."""
        self._something_ended()

    def _something_ended(self) -> None:
        self._nothing_ended, self._unfinished_bytes = False, 0

    def on_headers_complete(self) -> None:
        self._something_ended()
        if self.parser.offers_upgrade:
            return
        # The parser reports an exception raised here as its own, so the request is answered 400.
        request_head.check(self.parser.get_http_version(), self.url, self.headers)
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            # A disconnect is noticed only while the connection is read. Reading pauses at the next body or
            # request, which bounds the additional data.
            self.flow.resume_reading()
        if not self.pipeline:
            self._answering = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            # uvicorn begins the request that has waited longest.
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()
        # While a stream is generated, its calls handle a stalled client: their sequences pause, and end.
        if self._taking is not None:
            self._taking.watch()

    def on_message_complete(self) -> None:
        self._something_ended()
        if not self.parser.offers_upgrade:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._nothing_ended = True
        super().data_received(data)
        if self.transport.is_closing():
            return
        # The parser has seen `data`. The bytes of a completed head are no longer counted. If a head begins
        # after other data, its share of `data` is unknown.
        if self._nothing_ended:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > limits.MAX_HTTP_HEAD_BYTES:
                if self._in_head:  # otherwise an answer may be in progress
                    self.transport.write(STATUS_LINE[431] + _CLOSES)
                self.transport.close()
                return
        self._await_request()

    def _await_request(self) -> None:
        """Restart the idle timer, which any data stops, even data that begins no request.

        Examples are line ends between requests, and the body of a request that was answered without it.
        """
        idle = self.cycle is not None and self.cycle.response_complete and self._head_timer is None
        if idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _await_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        # Unread data cannot arrive, so the timer restarts when reading resumes.
        if not self.flow.read_paused:
            self.transport.close()

    def _is_read_again(self) -> None:
        if self._head_timer is not None:
            self._await_head()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _certificate_names(transport: asyncio.BaseTransport) -> list[str]:
    """The DNS names in the client's verified certificate; none without one."""
    connection = transport.get_extra_info("ssl_object")
    certificate = connection.getpeercert() if connection is not None else None
    return [name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, and reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def _tls_settings(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    settings: dict[str, Any] = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    settings |= {"ssl_ca_certs": tls.ca, "ssl_cert_reqs": ssl.CERT_REQUIRED} if tls.ca else {}
    return settings | {"ssl_context_factory": partial(_renewing_context, tls)}


def _renewing_context(tls: Tls, _: uvicorn.Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context that gives each handshake the current files. `make` reads them."""

    def made(tls: Tls) -> ssl.SSLContext:
        check_files(tls)
        return make()

    renewed = Renewed(tls, made, "the HTTP port")

    def take_present(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = renewed.present

    context = make()
    context.sni_callback = take_present  # also called for a client that names no server
    return context


class HttpServer:
    """Serves an ASGI application on a port."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: Tls | None = None,
        *,
        unread_timeout: float = 60.0,
        max_connections: int = limits.MAX_HTTP_CONNECTIONS,
    ) -> None:
        """Serve without TLS if `tls` is None.

        A client that takes none of a finished answer for `unread_timeout` seconds is disconnected. While
        `max_connections` are open, further connections are answered 503 and closed. Raises
        InvalidArgumentError naming a TLS file that cannot be used.
        """
        if tls is not None:
            check_files(tls)
        self._tls = tls
        self._host = host_in_address(host)
        self._port = port
        self._serving: asyncio.Task[None] | None = None
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=partial(  # type: ignore[arg-type]
                    BoundedProtocol, unread_timeout=unread_timeout, max_connections=max_connections
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                **_tls_settings(tls),
            )
        )

    @property
    def address(self) -> str:
        """host:port; available after `start`."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind and serve.

        Raises UnavailableError if the port is taken, InvalidArgumentError naming a TLS file that can no
        longer be used.
        """
        host = self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # [::] also accepts IPv4 clients, as in gRPC.
            both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server((host, self._port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {self.address} for HTTP") from error
        self._port = listener.getsockname()[1]
        serving = self._serving = asyncio.create_task(self._uvicorn.serve([listener]))
        listening = asyncio.create_task(self._uvicorn.listening.wait())
        try:
            await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if serving.done():
            self._serving = None
            listener.close()
            failure = serving.exception()
            if self._tls is not None:
                check_files(self._tls)
            raise UnavailableError(f"cannot serve HTTP on {self.address}") from failure

    async def stop(self, seconds: float) -> None:
        """Refuse new connections and let answers in progress finish; after `seconds` they are cut."""
        if self._serving is None:
            return
        self._uvicorn.config.timeout_graceful_shutdown = max(1, round(seconds))
        self._uvicorn.should_exit = True
        await self._serving
