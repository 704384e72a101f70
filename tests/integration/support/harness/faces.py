"""gRPC and HTTP of one coordinator behind a gate, on real ports without a model; and calls with a key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2
import pytest

from coordinator.api.grpc.auth import KeyInterceptor
from coordinator.api.grpc.calls import GrpcCallObserver
from coordinator.api.grpc.service import GenerationService
from coordinator.api.http.app import make_app
from coordinator.api.http.server.server import HttpServer
from coordinator.app import Coordinator
from coordinator.auth import Gate, Principal, principal
from coordinator.text.vocabulary import Vocabulary
from coordinator.workers.links import LinkState
from harness.links import link_workers
from harness.waiting import HANG
from paceline.client import AsyncClient
from paceline.core.clock import ManualClock
from paceline.core.config import CoordinatorConfig
from paceline.core.security.keys import ApiKey, KeyRing, digest
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.codec import GenerateCall, Resumption, generate_request_to_proto
from paceline.rpc.server.ports import client_port
from paceline.rpc.server.server import Server
from paceline.v1 import common_pb2, generation_pb2, generation_pb2_grpc

TOKEN = "pl-0123456789-a-key-of-alice"


def key(name: str = "alice", token: str = TOKEN, **bounds: int) -> ApiKey:
    return ApiKey(name=name, sha256=digest(token), **bounds)


def gate(*keys: ApiKey, clock: ManualClock | None = None) -> Gate:
    """Of these keys, or of alice's."""
    return Gate(KeyRing(keys or [key()]), clock or ManualClock())


@dataclass
class Faces:
    """Both ports of one coordinator, and who called it."""

    coordinator: Coordinator
    grpc_address: str
    url: str
    routes: list[str]
    callers: list[Principal]

    def sdk(self, api_key: str | None) -> AsyncClient:
        return AsyncClient(self.grpc_address, api_key=api_key)

    def web(self, token: str | None) -> httpx2.AsyncClient:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=HANG)


@contextlib.asynccontextmanager
async def serving(vocabulary: Vocabulary, gate: Gate | None) -> AsyncIterator[Faces]:
    """Its one target is nowhere."""
    config = CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="embedded:target", model_name="m")
    coordinator = Coordinator(config, vocabulary, gate=gate)
    link_workers(coordinator)
    callers: list[Principal] = []
    real = coordinator.detokenize
    coordinator.detokenize = lambda ids: callers.append(principal.get()) or real(ids)  # type: ignore[method-assign, func-returns-value]
    interceptors = [GrpcCallObserver(coordinator.metrics), KeyInterceptor(coordinator.gate)]
    bounds = client_port(100, config.max_request_seconds)
    server = Server(
        "coordinator",
        "127.0.0.1",
        0,
        interceptors=interceptors,
        bounds=bounds,
        max_request_bytes=lambda: coordinator.max_request_bytes,
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationService(coordinator, server), server.grpc
    )
    app = make_app(coordinator, None, gate=coordinator.gate)
    http = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    await http.start()
    routes: list[str] = [route.path for route in app.routes]  # type: ignore[attr-defined]
    try:
        yield Faces(coordinator, server.address, f"http://{http.address}", routes, callers)
    finally:
        await http.stop(1)
        await server.grpc.stop(None)
        coordinator.close()


def find_target(coordinator: Coordinator) -> None:
    """As if one had been there and were away for now: requests begin, and none comes to an end."""
    (link,) = coordinator.dispatcher.workers.targets
    link.known = link.admitted = common_pb2.WorkerInfo(
        model="m", max_model_len=100, vocabulary_size=coordinator.vocabulary.size, eos_token_ids=[0]
    )
    link.state = LinkState.LOST
    coordinator._target_found.set()


def asks(name: str, *received: int, again: bool = False) -> generation_pb2.GenerateRequest:
    """A request that may be resumed; `again` resumes it after `received`."""
    resumption = Resumption((len(received),), (received,)) if again else None
    sampling = SamplingParams(max_tokens=50, seed=1)
    call = GenerateCall(name, (5, 6), sampling, SpeculationParams(), resumable=True, resumption=resumption)
    return generate_request_to_proto(call)


class Raw:
    """Calls of one key, message by message."""

    def __init__(self, channel: grpc.aio.Channel, token: str = TOKEN) -> None:
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.metadata = (("authorization", f"Bearer {token}"),)

    async def begins(self, request: generation_pb2.GenerateRequest) -> Any:
        call: Any = self.stub.Generate(request, metadata=self.metadata, timeout=HANG)
        assert (await call.read()).HasField("started")
        return call

    async def is_refused(self, request: generation_pb2.GenerateRequest) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await self.begins(request)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def cancel(self, name: str) -> None:
        request = generation_pb2.CancelRequest(request_id=name)
        await self.stub.Cancel(request, metadata=self.metadata, timeout=HANG)
