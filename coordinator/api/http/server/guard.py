"""Authentication of the HTTP API: the client's key, then its certificate, before anything else is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.http.server.errors import from_error
from coordinator.auth import Gate, bearer, principal
from coordinator.telemetry import call_log
from paceline.core.errors import PacelineError
from paceline.rpc.security.auth import check_call, is_open

NAMES = "certificate_names"
"""Key in a request's state: DNS names of the client's certificate, if the port requires one."""


class Guard:
    """ASGI middleware. Every path needs a key, including unknown ones; only the health path is open."""

    def __init__(self, app: ASGIApp, gate: Gate, *, demands_certificates: bool) -> None:
        self._app = app
        self._gate = gate
        self._demands_certificates = demands_certificates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its caller set, or answer 401, 403 or 429."""
        path = scope["path"]
        if not is_open(path):
            try:
                caller = self._gate.recognise(bearer(Headers(scope=scope).getlist("authorization")))
                principal.set(caller)
                call_log.made_by(caller.name)
                self._gate.charge()
                if self._demands_certificates:
                    check_call("coordinator", scope.get("state", {}).get(NAMES, ()), path)
            except PacelineError as error:
                await from_error(error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
