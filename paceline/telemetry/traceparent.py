"""W3C trace contexts, and span ids that coordinator and workers compute alike. No I/O.

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
    """Reference to a span."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def parse(text: str) -> TraceParent | None:
    """Parse a traceparent; None if invalid, in which case the receiver begins a new trace."""
    match = _FIELDS.fullmatch(text)
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    # Later versions may add fields; version 00 has none, and ff is invalid.
    if version == "ff" or (version == "00" and more is not None):
        return None
    parent = TraceParent(int(trace, 16), int(span, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def round_span_id(request: TraceParent, sequence_id: str, round_number: int) -> int:
    """The id of a round's span. Coordinator and workers compute the same id, so it is not sent."""
    place = f"{request.span_id:016x}/{sequence_id}/{round_number}"
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1
