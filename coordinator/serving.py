"""A coordinator with the ports for its clients, in whatever process it runs. Must not import torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.api import chat_template
from coordinator.api.chat_template import ChatTemplate
from coordinator.api.conversations import Conversations
from coordinator.api.grpc.admin import AdminService
from coordinator.api.grpc.auth import KeyInterceptor, make_gate
from coordinator.api.grpc.calls import GrpcCallObserver
from coordinator.api.grpc.fleet import make_join_server
from coordinator.api.grpc.service import GenerationService
from coordinator.app import Coordinator
from coordinator.telemetry.tracing import Tracer
from coordinator.text.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InternalError
from paceline.core.security.secret import read_secret
from paceline.core.system import descriptors
from paceline.rpc.security.credentials import check_files
from paceline.rpc.server.ports import client_port
from paceline.rpc.server.server import FAREWELL_SECONDS, Server
from paceline.telemetry.tracing import make_spans
from paceline.v1 import admin_pb2_grpc, generation_pb2_grpc

if TYPE_CHECKING:
    from coordinator.api.http.server.server import HttpServer

log = logging.getLogger(__name__)

SERVICE = "paceline.v1.GenerationService"
DRAFT_GRACE_SECONDS = 30.0
"""Maximum wait for draft workers before readiness is announced, once a target is there."""


class Serving:
    """The coordinator, its gRPC server and, if configured, its HTTP server."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Load the tokenizer and assemble all parts. Raises InvalidArgumentError naming the field."""
        self.config = config
        self.gate = make_gate(config)
        if config.worker_tls is not None:
            check_files(config.worker_tls, "worker_tls")
        self._spans = make_spans(
            "coordinator", config.otlp_traces_endpoint, config.otlp_traces_sampling_ratio
        )
        observers = [] if self._spans is None else [Tracer(self._spans)]
        secret, vocabulary = read_secret(config.worker_secret_file), Vocabulary.load(config.tokenizer)
        self.coordinator = Coordinator(config, vocabulary, gate=self.gate, observers=observers, secret=secret)
        # The call observer comes before the authentication, so refused calls are logged too.
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = [
            GrpcCallObserver(self.coordinator.metrics),
            KeyInterceptor(self.gate),
        ]
        most = descriptors.connections(2 if config.http else 1)
        self.server = _server(config, self.interceptors, most, lambda: self.coordinator.max_request_bytes)
        self.template = chat_template.load(config.tokenizer, config.chat_template)
        self.http = _http_face(self.coordinator, config, self.template, most) if config.http else None
        conversations = Conversations(self.coordinator, self.template)
        self.service = GenerationService(self.coordinator, self.server, conversations, self.http)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.service, self.server.grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self.coordinator), self.server.grpc)
        if config.reflection:
            self.server.reflect(SERVICE)
        joined = self.coordinator.joined
        self.join_server = None if joined is None else make_join_server(joined, config, secret)
        """The port for workers that join; None unless configured."""

    async def run(self, started: Callable[[], None], ready: Callable[[], None]) -> None:
        """Serve until `server.request_stop()`, then drain.

        `started` is called once the gRPC port is bound, `ready` once requests will be served. Raises
        UnavailableError if a port is in use, InternalError if a part of the coordinator has failed.
        """
        server, http = self.server, self.http
        work = asyncio.create_task(self.coordinator.run())
        _abandon_with(work, server)
        try:
            await server.start()
            started()
            if http is not None:
                await http.start()
            if self.join_server is not None:
                await self.join_server.start()
                log.info("workers may join on %s", self.join_server.address)
            announcing = asyncio.create_task(announce(self.coordinator, server, ready))
            _abandon_with(announcing, server)
            try:
                await server.run_until_stopped(drain=self._drain)
            finally:
                announcing.cancel()
                if server.abandoned and http is not None:
                    await http.stop(0)
            if server.abandoned:
                # Such a coordinator can only be restarted; the exit code reports the failure.
                raise _failure(
                    {"the links to the workers failed": work, "cannot announce readiness": announcing}
                )
        finally:
            work.cancel()
            if self.join_server is not None:
                await self.join_server.grpc.stop(None)
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    async def _drain(self) -> None:
        await self.coordinator.drain(self.config.drain_timeout)
        if self.http is not None:
            await self.http.stop(FAREWELL_SECONDS)


async def announce(coordinator: Coordinator, server: Server, ready: Callable[[], None]) -> None:
    """Announce readiness once requests will be served, with speculation if it is configured.

    Without a target worker the health turns to NOT_SERVING; requests still wait for a target to come back.
    """
    await coordinator.wait_until_ready(DRAFT_GRACE_SECONDS)
    await server.set_serving(coordinator.serving, [SERVICE])
    ready()
    while True:
        await coordinator.readiness_changed.wait()
        coordinator.readiness_changed.clear()
        await server.set_serving(coordinator.serving, [SERVICE])


def _server(
    config: CoordinatorConfig,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    most: int,
    max_bytes: Callable[[], int],
) -> Server:
    bounds = client_port(min(most, limits.MAX_CLIENT_CONNECTIONS), config.max_request_seconds)
    address = config.host, config.port
    return Server(
        "coordinator",
        *address,
        tls=config.tls,
        interceptors=interceptors,
        bounds=bounds,
        max_request_bytes=max_bytes,
    )


def _abandon_with(task: asyncio.Task[Any], server: Server) -> None:
    """Stop the server when the task ends, unless it was cancelled."""
    task.add_done_callback(lambda ended: None if ended.cancelled() else server.abandon())


def _failure(tasks: Mapping[str, asyncio.Task[Any]]) -> InternalError:
    """The error for the first task that ended by itself; it is logged."""
    for told, task in tasks.items():
        if task.done() and not task.cancelled():
            error = task.exception()
            log.error(told, exc_info=error)
            # The system's error, for example of standard output, shows the operator what to fix.
            return InternalError(f"{told}: {error}" if isinstance(error, OSError) else told)
    raise AssertionError("the server stops only when one of the tasks has ended")


def _http_face(
    coordinator: Coordinator, config: CoordinatorConfig, template: ChatTemplate | None, most: int
) -> HttpServer:
    from coordinator.api.http.app import make_server  # loaded only if HTTP is served

    return make_server(coordinator, config, template, min(most, limits.MAX_HTTP_CONNECTIONS))
