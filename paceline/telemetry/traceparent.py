"""The W3C trace context of a span, and the ids of the spans that two processes must agree on. Pure.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span as others name it."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def parse(text: str) -> TraceParent | None:
    """None for what is none: a receiver then begins a trace of its own."""
    match = _FIELDS.fullmatch(text)
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    # A later version may add fields; this one has none more, and ff is no version.
    if version == "ff" or (version == "00" and more is not None):
        return None
    parent = TraceParent(int(trace, 16), int(span, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def round_span_id(request: TraceParent, sequence_id: str, round_number: int) -> int:
    """The id of a round's span: coordinator and workers compute the same one, so it need not be sent."""
    place = f"{request.span_id:016x}/{sequence_id}/{round_number}"
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1
