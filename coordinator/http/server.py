"""The HTTP port: uvicorn in the event loop of the gRPC face, with bounds on what a client may send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from coordinator.http.guard import NAMES
from paceline.core import limits
from paceline.core.errors import UnavailableError
from paceline.core.tls import Tls
from paceline.rpc.credentials import check_files

HEAD_SECONDS = 10.0
"""How long a client may take for the request line and headers."""
KEEP_ALIVE_SECONDS = 75
"""How long a connection may be idle between two requests: longer than common proxies and pools keep one."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose request heads are bounded in size and time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._certificate_names: list[str] = []
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._certificate_names = _certificate_names(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][NAMES] = self._certificate_names
        self._in_head, self._head_bytes = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # The parser has seen `data`: a head that it completed is no longer counted.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > limits.MAX_HTTP_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(STATUS_LINE[431] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()

    def _await_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _certificate_names(transport: asyncio.BaseTransport) -> list[str]:
    """The DNS names in the client's certificate, which the handshake has verified; none without one."""
    connection = transport.get_extra_info("ssl_object")
    certificate = connection.getpeercert() if connection is not None else None
    return [name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, and says when it listens."""

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
    return settings | ({"ssl_ca_certs": tls.ca, "ssl_cert_reqs": ssl.CERT_REQUIRED} if tls.ca else {})


class HttpServer:
    """An ASGI application on a port."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: Tls | None = None) -> None:
        """Without `tls` plain text. Raises InvalidArgumentError naming the TLS file that cannot be used."""
        if tls is not None:
            check_files(tls)
        self._host = host
        self._port = port
        self._serving: asyncio.Task[None] | None = None
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=limits.MAX_HTTP_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                **_tls_settings(tls),
            )
        )

    @property
    def address(self) -> str:
        """host:port; known after `start`."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind and serve. Raises UnavailableError when the port is taken."""
        host = self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # As gRPC does, [::] takes IPv4 clients as well.
            both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server((host, self._port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {self.address} for HTTP") from error
        self._port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._uvicorn.serve([listener]))
        await self._uvicorn.listening.wait()

    async def stop(self, seconds: float) -> None:
        """Refuse connections, and let answers that are being sent end; after `seconds` they are cut."""
        if self._serving is None:
            return
        self._uvicorn.config.timeout_graceful_shutdown = max(1, round(seconds))
        self._uvicorn.should_exit = True
        await self._serving
