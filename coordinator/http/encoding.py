"""JSON and server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # A reverse proxy that gathers events defeats streaming.
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
"""The last event of a stream that is whole."""


class JsonResponse(Response):
    """A JSON object as the whole answer."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(orjson.dumps(content), status, headers)


def event(content: Any) -> bytes:
    """One server-sent event. JSON has no raw line ends, so one `data:` line holds it."""
    return b"data: " + orjson.dumps(content) + b"\n\n"
