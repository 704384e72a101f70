"""Frames for a worker's stream as long as a message may be, as bytes; the same for both roles."""

from __future__ import annotations

from typing import Final

from paceline.core.limits import MAX_MESSAGE_BYTES
from paceline.core.messages import OpenSequence
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.rpc.streams import frames
from tests.fault.bombs.lists import field, varint

ROOM: Final = MAX_MESSAGE_BYTES - 2**16


def _opening() -> bytes:
    """OpenTargetSequence, or OpenDraftSequence: the same fields."""
    params = SequenceParams(SamplingParams(max_tokens=None), AcceptanceMode.COUPLED, 1)
    request = frames.verify_request([OpenSequence("bomb", 1, (5,), params)])
    message: bytes = request.commands[0].open_sequence.SerializeToString()
    return message


def _opened_with(more: bytes) -> bytes:
    """A frame of one opening, to which `more` is added."""
    return field(1, field(1, _opening() + more))


FRAMES: Final[dict[str, bytes]] = {
    "commands": field(1, b"") * (ROOM // 2),
    "openings": field(1, field(1, _opening())) * (ROOM // (len(_opening()) + 6)),
    "token ids": _opened_with(field(3, b"\x05" * ROOM)),
    "unpacked token ids": _opened_with(b"\x18\x05" * (ROOM // 2)),
    "unknown fields": (varint(999 << 3) + b"\x00") * (ROOM // 3),
    "unknown fields inside": _opened_with((varint(999 << 3) + b"\x00") * (ROOM // 3)),
    "long identifier": _opened_with(field(1, b"x" * ROOM)),
}
