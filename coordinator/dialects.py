"""What differs between talking to a draft worker and to a target worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from paceline.core.messages import DraftCommand, DraftEvent, TargetCommand, TargetEvent
from paceline.rpc import frames
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc


class Dialect(Protocol):
    """One kind of worker."""

    @property
    def role(self) -> str:
        """`draft` or `target`."""

    async def info(self, channel: grpc.aio.Channel, seconds: float) -> common_pb2.WorkerInfo:
        """Ask the worker what it is."""

    def open(self, channel: grpc.aio.Channel) -> Any:
        """The bidirectional stream."""

    def request(self, commands: Sequence[Any]) -> Any:
        """A frame of commands."""

    def read(self, frame: bytes) -> Any:
        """A frame that came as bytes. Raises DecodeError."""

    def events(self, frame: Any) -> Sequence[Any]:
        """The events of a frame."""


class TargetDialect:
    """Verify streams."""

    role = "target"

    async def info(self, channel: grpc.aio.Channel, seconds: float) -> common_pb2.WorkerInfo:
        """Ask the worker what it is."""
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = target_pb2.TargetServiceGetWorkerInfoRequest()
        return (await stub.GetWorkerInfo(request, timeout=seconds, wait_for_ready=True)).info

    def open(self, channel: grpc.aio.Channel) -> Any:
        """The bidirectional stream."""
        return target_pb2_grpc.TargetServiceStub(channel).Verify()

    def request(self, commands: Sequence[TargetCommand]) -> target_pb2.VerifyRequest:
        """A frame of commands."""
        return frames.verify_request(commands)

    def read(self, frame: bytes) -> target_pb2.VerifyResponse:
        """A frame that came as bytes. Raises DecodeError."""
        return target_pb2.VerifyResponse.FromString(frame)

    def events(self, frame: target_pb2.VerifyResponse) -> Sequence[TargetEvent]:
        """The events of a frame."""
        return frames.target_events(frame)


class DraftDialect:
    """Draft streams."""

    role = "draft"

    async def info(self, channel: grpc.aio.Channel, seconds: float) -> common_pb2.WorkerInfo:
        """Ask the worker what it is."""
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        request = draft_pb2.DraftServiceGetWorkerInfoRequest()
        return (await stub.GetWorkerInfo(request, timeout=seconds, wait_for_ready=True)).info

    def open(self, channel: grpc.aio.Channel) -> Any:
        """The bidirectional stream."""
        return draft_pb2_grpc.DraftServiceStub(channel).Draft()

    def request(self, commands: Sequence[DraftCommand]) -> draft_pb2.DraftRequest:
        """A frame of commands."""
        return frames.draft_request(commands)

    def read(self, frame: bytes) -> draft_pb2.DraftResponse:
        """A frame that came as bytes. Raises DecodeError."""
        return draft_pb2.DraftResponse.FromString(frame)

    def events(self, frame: draft_pb2.DraftResponse) -> Sequence[DraftEvent]:
        """The events of a frame."""
        return frames.draft_events(frame)
