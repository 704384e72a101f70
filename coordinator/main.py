"""The coordinator's process. This module must not import torch."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.api import chat_template
from coordinator.api.chat_template import ChatTemplate
from coordinator.api.conversations import Conversations
from coordinator.api.grpc.auth import KeyInterceptor, make_gate, reload_on_hangup, warn_if_open
from coordinator.api.grpc.calls import GrpcCallObserver
from coordinator.api.grpc.profile import ProfileService
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
from paceline.rpc.server import event_loop
from paceline.rpc.server.parent_watch import leave_with_parent
from paceline.rpc.server.ports import client_port
from paceline.rpc.server.server import FAREWELL_SECONDS, Server, tune_interpreter
from paceline.telemetry.logs import configure_logging
from paceline.telemetry.tracing import make_spans
from paceline.v1 import generation_pb2_grpc, profile_pb2_grpc

if TYPE_CHECKING:
    from coordinator.api.http.server.server import HttpServer

log = logging.getLogger(__name__)

SERVICE = "paceline.v1.GenerationService"
DRAFT_GRACE_SECONDS = 30.0
"""Maximum wait for draft workers before readiness is announced, once a target is there."""


async def _serve(config: CoordinatorConfig) -> None:
    loaded = threading.Event()
    if config.exit_with_parent:
        leave_with_parent(unless=loaded)
    gate = make_gate(config)
    if config.worker_tls is not None:
        check_files(config.worker_tls, "worker_tls")
    spans = make_spans("coordinator", config.otlp_traces_endpoint, config.otlp_traces_sampling_ratio)
    observers = [] if spans is None else [Tracer(spans)]
    secret, vocabulary = read_secret(config.worker_secret_file), Vocabulary.load(config.tokenizer)
    coordinator = Coordinator(config, vocabulary, gate=gate, observers=observers, secret=secret)
    # The call observer comes before the authentication, so refused calls are logged too.
    most = descriptors.connections(2 if config.http else 1)
    server = _server(
        config,
        [GrpcCallObserver(coordinator.metrics), KeyInterceptor(gate)],
        most,
        lambda: coordinator.max_request_bytes,
    )
    work = asyncio.create_task(coordinator.run())
    _abandon_with(work, server)
    template = chat_template.load(config.tokenizer, config.chat_template)
    http = _http_face(coordinator, config, template, most) if config.http else None
    service = GenerationService(coordinator, server, Conversations(coordinator, template), http)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.grpc)
    profile_pb2_grpc.add_ProfileServiceServicer_to_server(ProfileService(coordinator), server.grpc)
    if config.reflection:
        server.reflect(SERVICE)

    async def drain() -> None:
        await coordinator.drain(config.drain_timeout)
        if http is not None:
            await http.stop(FAREWELL_SECONDS)

    try:
        await server.start()
        server.heed_signals(exit_with_parent=config.exit_with_parent)
        loaded.set()
        warn_if_open(config)
        tell_of_client_certificates(config)
        reload_on_hangup(gate, config)
        if http is not None:
            await http.start()
        announcing = asyncio.create_task(_announce(coordinator, server, http))
        _abandon_with(announcing, server)
        try:
            await server.run_until_stopped(exit_with_parent=config.exit_with_parent, drain=drain)
        finally:
            announcing.cancel()
            if server.abandoned and http is not None:
                await http.stop(0)
        if server.abandoned:
            # Such a coordinator can only be restarted; the exit code reports the failure.
            raise _failure({"the links to the workers failed": work, "cannot announce readiness": announcing})
    finally:
        work.cancel()
        if spans is not None:
            await asyncio.to_thread(spans.close)


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


def tell_of_client_certificates(config: CoordinatorConfig) -> None:
    """Log that clients need a certificate: `PACELINE_TLS_CA` may have been meant for a client's command."""
    if config.tls is not None and config.tls.ca:
        log.info("clients must present a certificate of the authority in %s (tls_ca)", config.tls.ca)


def _http_face(
    coordinator: Coordinator, config: CoordinatorConfig, template: ChatTemplate | None, most: int
) -> HttpServer:
    from coordinator.api.http.app import make_server  # loaded only if HTTP is served

    return make_server(coordinator, config, template, min(most, limits.MAX_HTTP_CONNECTIONS))


async def _announce(coordinator: Coordinator, server: Server, http: HttpServer | None) -> None:
    """Announce readiness once requests will be served, with speculation if it is configured.

    Without a target worker the health turns to NOT_SERVING; requests still wait for a target to come back.
    """
    await coordinator.wait_until_ready(DRAFT_GRACE_SECONDS)
    await server.set_serving(coordinator.serving, [SERVICE])
    tune_interpreter()
    server.announce(**({} if http is None else {"http_address": http.address}))
    log.info("the coordinator listens on %s", server.address)
    if http is not None:
        log.info("HTTP is served on %s", http.address)
    while True:
        await coordinator.readiness_changed.wait()
        coordinator.readiness_changed.clear()
        await server.set_serving(coordinator.serving, [SERVICE])


def run(config: CoordinatorConfig) -> None:
    """Serve until told to stop. Raises PacelineError when the coordinator cannot start."""
    configure_logging("coordinator", config.log_format, named_by_parent=config.exit_with_parent)
    event_loop.run(_serve(config))
