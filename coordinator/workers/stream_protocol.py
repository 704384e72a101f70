"""The differences between streams to draft workers and to target workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.rpc.streams import frames
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

Metadata = tuple[tuple[str, str], ...]
NO_METADATA: Final[Metadata] = ()


@dataclass(frozen=True, slots=True)
class StreamProtocol:
    """The stream to one kind of worker."""

    role: str
    """`draft` or `target`."""
    service: str
    """Full name of the gRPC service, for its health."""
    stub: Callable[[grpc.aio.Channel], Any]
    question: Callable[[], Message]
    """Request of `GetWorkerInfo`."""
    stream: str
    """Name of the stub's method for the bidirectional stream."""
    request: Callable[[Sequence[Any]], Message]
    """Builds a frame of commands."""
    response: type[Message]
    events: Callable[[Any], Sequence[Any]]
    """Extracts the events of a response."""

    async def info(
        self, channel: grpc.aio.Channel, seconds: float, metadata: Metadata = NO_METADATA
    ) -> common_pb2.WorkerInfo:
        """Ask the worker to describe itself. Raises DecodeError."""
        answer = await self.stub(channel).GetWorkerInfo(
            self.question(), timeout=seconds, wait_for_ready=True, metadata=metadata
        )
        info: common_pb2.WorkerInfo = _readable(answer).info
        return info

    async def drains(self, channel: grpc.aio.Channel) -> AsyncIterator[bool]:
        """Whether the worker says that it does not serve, and again at each change. Raises DecodeError."""
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=self.service)):
            yield _readable(answer).status == health_pb2.HealthCheckResponse.NOT_SERVING

    def open(self, channel: grpc.aio.Channel, metadata: Metadata = NO_METADATA) -> Any:
        """Open the bidirectional stream."""
        return getattr(self.stub(channel), self.stream)(metadata=metadata)

    def take(self, response: Any) -> Sequence[Any]:
        """Extract the events of a response read by gRPC. Raises DecodeError."""
        return self.events(_readable(response))

    def read(self, frame: bytes) -> Sequence[Any]:
        """Extract the events of a response given as bytes. Raises DecodeError."""
        return self.events(self.response.FromString(frame))


def _readable(message: Any) -> Any:
    """Return a message read by grpc.aio. Raises DecodeError if it is None, which means undecodable bytes."""
    if message is None:
        raise DecodeError("a worker sent bytes that are not a message")
    return message


TARGET = StreamProtocol(
    "target",
    "paceline.v1.TargetService",
    target_pb2_grpc.TargetServiceStub,
    target_pb2.TargetServiceGetWorkerInfoRequest,
    "Verify",
    frames.verify_request,
    target_pb2.VerifyResponse,
    frames.target_events,
)
DRAFT = StreamProtocol(
    "draft",
    "paceline.v1.DraftService",
    draft_pb2_grpc.DraftServiceStub,
    draft_pb2.DraftServiceGetWorkerInfoRequest,
    "Draft",
    frames.draft_request,
    draft_pb2.DraftResponse,
    frames.draft_events,
)
PROTOCOLS: Final = {protocol.role: protocol for protocol in (TARGET, DRAFT)}
"""The protocols by role."""
