"""What a request is told that comes while the server stops, or that its end overtakes."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.coordinator import Coordinator
from coordinator.http.errors import from_error
from paceline.core.errors import UnavailableError

ANSWERED: Final = frozenset({"/health", "/ping", "/metrics"})
"""Paths that tell of the stop themselves."""


class Farewell:
    """ASGI middleware: while the coordinator stops new requests are answered 503, but for health and metrics.

    So is one that is cut then. Such are a body that does not come and a wait for a target: to the coordinator
    nothing runs yet, so that it does not wait for them, and the port cancels them. To one that was begun to
    be answered nothing can be added.
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
