"""Requests with lists as long as a message may be."""

from __future__ import annotations

from typing import Final

from paceline.core.limits import MAX_CLIENT_MESSAGE_BYTES
from paceline.v1 import generation_pb2

ROOM: Final = MAX_CLIENT_MESSAGE_BYTES - 2**16


def _bytes(request: generation_pb2.GenerateRequest, path: str, element: bytes) -> bytes:
    """The request with a field of elements, as bytes: to make a message of them would take minutes."""
    inner = element * (ROOM // len(element))
    if path == "sampling":
        # Parts of one field are merged.
        return request.SerializeToString() + field(3 + 1, inner)
    return request.SerializeToString() + inner


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def _request() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(request_id="bomb", text="a")


LISTS: Final[dict[str, bytes]] = {
    "logit_bias": _bytes(_request(), "sampling", field(8, b"")),
    "stop": _bytes(_request(), "sampling", field(12, b"")),
    "stop_token_ids": _bytes(_request(), "sampling", varint(13 << 3) + b"\x00"),
    "allowed_token_ids": _bytes(_request(), "sampling", varint(17 << 3) + b"\x00"),
    "resume_from": _bytes(_request(), "", varint(7 << 3) + b"\x00"),
    "received": _bytes(_request(), "", field(8, b"")),
    "unknown fields": _bytes(_request(), "", varint(999 << 3) + b"\x00"),
}
"""Whole messages of Generate, by what is in them."""
