"""JSON and server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # A buffering reverse proxy defeats streaming.
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
"""The last event of a complete stream."""

ABORT_CONNECTION = "abort"
"""Key in a request's state, set by the server: drops the connection and its unsent data."""
WATCH = "watch"
"""Key in a request's state, set by the server: drops the connection if its client stops reading."""
PIECE = 64 * 1024


class JsonResponse(Response):
    """A JSON object as a complete answer.

    It is sent in pieces; each piece waits until the client has taken most of those before it.
    """

    media_type = "application/json"

    def __init__(
        self,
        content: Any,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        took: Callable[[], None] = lambda: None,
    ) -> None:
        """`took` is called whenever the client has taken data."""
        super().__init__(orjson.dumps(content), status, headers)
        self._took = took

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        watch = scope.get("state", {}).get(WATCH, lambda: None)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = bytes(self.body)
        for begin in range(0, len(body), PIECE):
            watch()
            more = begin + PIECE < len(body)
            piece = body[begin : begin + PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            self._took()


def event(content: Any) -> bytes:
    """One server-sent event. JSON contains no raw line ends, so one `data:` line holds it."""
    return b"data: " + orjson.dumps(content) + b"\n\n"
