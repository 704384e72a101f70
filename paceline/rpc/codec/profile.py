"""Requests for profiles: validation, and the parts of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline.core import limits
from paceline.core.validation import number, require
from paceline.rpc.codec.sampling import refuse_unknown_fields
from paceline.v1 import admin_pb2

_PART_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ProfileCall:
    """A request for a profile."""

    seconds: float
    worker: str = ""
    """Role or address of a coordinator's worker; empty at a worker, and for the target."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        most = limits.MAX_PROFILE_SECONDS
        seconds = number("seconds", self.seconds)
        require(0 < seconds <= most, "seconds", f"must be above 0 and at most {most:g}, got {seconds:g}")
        longest = limits.MAX_WORKER_NAME_CHARACTERS
        require(len(self.worker) <= longest, "worker", f"at most {longest} characters")

    def to_proto(self) -> admin_pb2.ProfileRequest:
        """The message."""
        return admin_pb2.ProfileRequest(seconds=self.seconds, worker=self.worker)


def profile_call_from_proto(request: admin_pb2.ProfileRequest) -> ProfileCall:
    """Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(request, "request")
    return ProfileCall(request.seconds, request.worker)


def profile_responses(trace: bytes) -> Iterator[admin_pb2.ProfileResponse]:
    """A trace in parts that fit into messages."""
    for start in range(0, len(trace), _PART_BYTES):
        yield admin_pb2.ProfileResponse(trace=trace[start : start + _PART_BYTES])
