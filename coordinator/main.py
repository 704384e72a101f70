"""The coordinator's process. No torch in here."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from coordinator.coordinator import Coordinator
from coordinator.service import GenerationService
from coordinator.vocabulary import Vocabulary
from paceline.core.config import CoordinatorConfig
from paceline.rpc.server import FAREWELL_SECONDS, Server, configure_logging, tune_interpreter
from paceline.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from coordinator.http.server import HttpServer

log = logging.getLogger(__name__)

SERVICE = "paceline.v1.GenerationService"
DRAFT_GRACE_SECONDS = 30.0
"""How long the announcement waits for draft workers once a target is there."""


async def _serve(config: CoordinatorConfig) -> None:
    coordinator = Coordinator(config, Vocabulary.load(config.tokenizer))
    server = Server("coordinator", config.host, config.port)
    work = asyncio.create_task(coordinator.run())
    http = _http_face(coordinator, config) if config.http else None
    service = GenerationService(coordinator, server, http)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.grpc)
    if config.reflection:
        server.reflect(SERVICE)

    async def drain(seconds: float) -> None:
        await coordinator.drain(seconds)
        if http is not None:
            await http.stop(FAREWELL_SECONDS)

    try:
        await server.start()
        if http is not None:
            await http.start()
        announcing = asyncio.create_task(_announce(coordinator, server, http))
        await server.run_until_stopped(exit_with_parent=config.exit_with_parent, drain=drain)
        announcing.cancel()
    finally:
        work.cancel()


def _http_face(coordinator: Coordinator, config: CoordinatorConfig) -> HttpServer:
    from coordinator.http.app import make_server  # a coordinator without this face does not load it

    return make_server(coordinator, config)


async def _announce(coordinator: Coordinator, server: Server, http: HttpServer | None) -> None:
    """Ready means that requests will be served, with speculation if it is configured.

    Without a target worker the health turns to NOT_SERVING; requests still wait for one to come back.
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
    configure_logging("coordinator")
    asyncio.run(_serve(config))
