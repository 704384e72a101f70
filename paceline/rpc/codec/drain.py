"""Requests to drain a worker, and the report of it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import limits
from paceline.core.validation import require
from paceline.rpc.codec.sampling import refuse_unknown_fields
from paceline.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class DrainCall:
    """A request to drain a worker."""

    worker: str = ""
    """Role or address of a coordinator's worker; empty at a worker."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        longest = limits.MAX_WORKER_NAME_CHARACTERS
        require(len(self.worker) <= longest, "worker", f"at most {longest} characters")

    def to_proto(self) -> admin_pb2.DrainRequest:
        """The message."""
        return admin_pb2.DrainRequest(worker=self.worker)


def drain_call_from_proto(request: admin_pb2.DrainRequest) -> DrainCall:
    """Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(request, "request")
    return DrainCall(request.worker)
