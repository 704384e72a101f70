"""Counts HTTP calls and logs each one at its end."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.http.server.errors import from_error
from coordinator.telemetry import call_log
from coordinator.telemetry.metrics import Metrics
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import InvalidArgumentError

OTHER = "other"
"""Metric label of unknown paths and methods, so that clients cannot create labels."""
LEFT = 499
"""Status of a call whose client disconnected before the response began."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET = frozenset({"/health", "/ping", "/metrics"})


class HttpCallObserver:
    """ASGI middleware. It runs inside the handler of unexpected errors and outside those of known errors."""

    def __init__(self, app: ASGIApp, metrics: Metrics, clock: Clock = monotonic) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the call to the application, then count and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        app, given, refused_field = self._app, "", ""
        try:
            given = call_log.given_id(_values(scope, call_log.REQUEST_ID))
        except InvalidArgumentError as error:
            app, refused_field = from_error(error).response(), error.field
        began, parent = self._clock(), _traceparent(scope)
        call = call_log.Call("http", method, began, parent, given_id=given, refused_field=refused_field)
        status = LEFT

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if given:
                    MutableHeaders(scope=message)[call_log.REQUEST_ID] = given
            await send(message)

        with call_log.taking(call):
            try:
                await app(scope, receive, observed)
            except Exception:
                status = 500
                raise
            finally:
                path = _path(scope)
                call.method, call.quiet = f"{method} {path}", path in _QUIET
                self._metrics.http_calls[method, path, str(status)] += 1
                call.finish(str(status), self._clock())


def _path(scope: Scope) -> str:
    """The path of the call's route, with parameter names instead of values."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else OTHER


def _traceparent(scope: Scope) -> str:
    found = _values(scope, "traceparent")
    return found[0] if len(found) == 1 else ""


def _values(scope: Scope, header: str) -> list[str]:
    return Headers(scope=scope).getlist(header)
