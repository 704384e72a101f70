"""Reads a request's body: limits on size and time, JSON parsing, schema validation."""

from __future__ import annotations

import asyncio
import codecs
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from coordinator.api.http.server.errors import HttpError, from_validation
from paceline.core import limits
from paceline.core.errors import CancelledError

BODY_SECONDS = 60.0
"""Time limit for sending a body."""

_CLOSE = {"connection": "close"}

Model = TypeVar("Model", bound=BaseModel)


async def read(request: Request, model: type[Model]) -> Model:
    """Raises HttpError naming the field; CancelledError if the client went away."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await _read_bytes(request)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        raise HttpError(408, message, code="timeout", headers=_CLOSE) from None
    except ClientDisconnect:
        raise CancelledError("the client went away") from None
    return parse(raw, model)


async def _read_bytes(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limits.MAX_HTTP_BODY_BYTES:
            message = f"the body must not exceed {limits.MAX_HTTP_BODY_BYTES} bytes"
            raise HttpError(413, message, code="body_too_large", headers=_CLOSE)
        parts.append(part)
    return b"".join(parts)


def _check_shape(raw: bytes) -> None:
    """Refuse JSON that would be slow to parse: some of its bytes cost a hundred times more than others."""
    if _within(raw):
        return
    if not _within(_without_texts(raw)):
        message = (
            f"the body must not have more than {limits.MAX_JSON_VALUES} values"
            f" and {limits.MAX_JSON_CONTAINERS} objects and lists"
        )
        raise HttpError(400, message, code="too_many_values")


def _without_texts(raw: bytes) -> bytes:
    """The JSON without the content of its strings, whose punctuation is not structure."""
    if raw.count(b'"') > 4 * limits.MAX_JSON_VALUES:
        return raw
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def _within(raw: bytes) -> bool:
    containers = raw.count(b"{") + raw.count(b"[")
    return containers <= limits.MAX_JSON_CONTAINERS and raw.count(b",") < limits.MAX_JSON_VALUES


def parse(raw: bytes, model: type[Model]) -> Model:
    """Parse the body; a byte order mark is allowed. Raises HttpError 400 for invalid JSON or fields."""
    _check_shape(raw)
    try:
        values = orjson.loads(raw.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError:
        raise HttpError(400, "the body is not valid JSON in UTF-8", code="invalid_json") from None
    if not isinstance(values, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_type")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from None
