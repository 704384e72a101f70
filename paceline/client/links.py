"""A client's connection to one coordinator, synchronous and asynchronous."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from paceline.client.channel import CHANNEL_OPTIONS, translated
from paceline.client.reading import Call
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import Options, open_aio_channel, open_channel
from paceline.v1 import generation_pb2
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

CANCEL_SECONDS = 1.0
"""Longest time a closing client spends on cancelling its requests at the servers."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(eq=False, slots=True)
class SyncLink:
    """The connection of the synchronous client."""

    address: str
    channel: grpc.Channel
    stub: GenerationServiceStub
    metadata: Metadata

    @classmethod
    def to(cls, address: str, name: str, tls: Tls | None, metadata: Metadata) -> SyncLink:
        """Connects with the first call. `name` is the host name that the address was found by, or empty."""
        channel = open_channel(address, _options(name), _tls(name, tls))
        return cls(address, channel, GenerationServiceStub(channel), metadata)

    def generate(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> Any:
        """Begin a call. Raises ClientClosedError."""
        with translated():
            return self.stub.Generate(request, timeout=timeout, metadata=self.metadata)

    def cancel(self, request_id: str) -> Any:
        """Begin to tell the server that the request will not be resumed here."""
        request = generation_pb2.CancelRequest(request_id=request_id)
        return self.stub.Cancel.future(request, timeout=CANCEL_SECONDS, metadata=self.metadata)


@dataclass(eq=False, slots=True)
class AsyncLink:
    """The connection of the asyncio client, within one event loop."""

    address: str
    channel: grpc.aio.Channel
    stub: GenerationServiceAsyncStub
    metadata: Metadata

    @classmethod
    def to(cls, address: str, name: str, tls: Tls | None, metadata: Metadata) -> AsyncLink:
        """Connects with the first call. `name` is the host name that the address was found by, or empty."""
        channel = open_aio_channel(address, _options(name), _tls(name, tls))
        return cls(address, channel, GenerationServiceStub(channel), metadata)

    def generate(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> Call:
        """Begin a call. Raises ClientClosedError."""
        with translated():
            return self.stub.Generate(request, timeout=timeout, metadata=self.metadata)

    def cancel(self, request_id: str) -> grpc.aio.UnaryUnaryCall[Any, Any]:
        """Begin to tell the server that the request will not be resumed here. Raises grpc.aio.UsageError."""
        request = generation_pb2.CancelRequest(request_id=request_id)
        return self.stub.Cancel(request, timeout=CANCEL_SECONDS, metadata=self.metadata)


def _options(name: str) -> Options:
    return [*CHANNEL_OPTIONS, ("grpc.default_authority", name)] if name else CHANNEL_OPTIONS


def _tls(name: str, tls: Tls | None) -> Tls | None:
    """The server's certificate is for the name that the user wrote, not for one of its IP addresses."""
    return replace(tls, server_name=name) if name and tls is not None and not tls.server_name else tls
