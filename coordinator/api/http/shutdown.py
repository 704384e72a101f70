"""Answers requests that arrive, or are cancelled, while the server stops."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.http.server.errors import from_error
from coordinator.app import Coordinator
from paceline.core.errors import UnavailableError

ANSWERED: Final = frozenset({"/health", "/ping", "/metrics"})
"""Paths that report the shutdown themselves."""


class Farewell:
    """ASGI middleware: during shutdown, new requests are answered 503, except health and metrics.

    A request that arrived earlier and is cancelled because the port closes is also answered 503: its body has
    not arrived, or it waits for a target, and the coordinator does not wait for it. An answer that has begun
    cannot be changed.
    """

    def __init__(self, app: ASGIApp, coordinator: Coordinator) -> None:
        self._app = app
        self._coordinator = coordinator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        stopping = from_error(UnavailableError("the coordinator is stopping"))
        if self._coordinator.draining and scope["type"] == "http" and scope["path"] not in ANSWERED:
            await stopping.response()(scope, receive, send)
            return
        begun = False

        async def observed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except asyncio.CancelledError:
            if begun or not self._coordinator.draining:
                raise
            await stopping.response()(scope, receive, send)
