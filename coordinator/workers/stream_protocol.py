"""What differs between the streams to a draft worker and to a target worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from paceline.rpc.streams import frames
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

Metadata = tuple[tuple[str, str], ...]
NO_METADATA: Final[Metadata] = ()


@dataclass(frozen=True, slots=True)
class StreamProtocol:
    """One kind of worker."""

    role: str
    """`draft` or `target`."""
    stub: Callable[[grpc.aio.Channel], Any]
    question: Callable[[], Message]
    """Request of `GetWorkerInfo`."""
    stream: str
    """Method of the stub: the bidirectional stream."""
    request: Callable[[Sequence[Any]], Message]
    """A frame of commands."""
    response: type[Message]
    events: Callable[[Any], Sequence[Any]]
    """The events of a response."""

    async def info(
        self, channel: grpc.aio.Channel, seconds: float, metadata: Metadata = NO_METADATA
    ) -> common_pb2.WorkerInfo:
        """Ask the worker to describe itself. Raises DecodeError."""
        answer = await self.stub(channel).GetWorkerInfo(
            self.question(), timeout=seconds, wait_for_ready=True, metadata=metadata
        )
        info: common_pb2.WorkerInfo = _readable(answer).info
        return info

    def open(self, channel: grpc.aio.Channel, metadata: Metadata = NO_METADATA) -> Any:
        """The bidirectional stream."""
        return getattr(self.stub(channel), self.stream)(metadata=metadata)

    def take(self, response: Any) -> Sequence[Any]:
        """The events of a response that came from gRPC. Raises DecodeError."""
        return self.events(_readable(response))

    def read(self, frame: bytes) -> Sequence[Any]:
        """The events of a response that came as bytes. Raises DecodeError."""
        return self.events(self.response.FromString(frame))


def _readable(message: Any) -> Any:
    """The message that grpc.aio read. It is None for bytes that do not parse: raises DecodeError."""
    if message is None:
        raise DecodeError("a worker sent bytes that are no message")
    return message


TARGET = StreamProtocol(
    "target",
    target_pb2_grpc.TargetServiceStub,
    target_pb2.TargetServiceGetWorkerInfoRequest,
    "Verify",
    frames.verify_request,
    target_pb2.VerifyResponse,
    frames.target_events,
)
DRAFT = StreamProtocol(
    "draft",
    draft_pb2_grpc.DraftServiceStub,
    draft_pb2.DraftServiceGetWorkerInfoRequest,
    "Draft",
    frames.draft_request,
    draft_pb2.DraftResponse,
    frames.draft_events,
)
PROTOCOLS: Final = {protocol.role: protocol for protocol in (TARGET, DRAFT)}
"""By role."""
