"""The coordinator's process. No torch in here."""

from __future__ import annotations

import asyncio
import logging

from coordinator.coordinator import Coordinator
from coordinator.service import GenerationService
from coordinator.vocabulary import Vocabulary
from paceline.core.config import CoordinatorConfig
from paceline.rpc.server import Server, configure_logging, tune_interpreter
from paceline.v1 import generation_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = "paceline.v1.GenerationService"
DRAFT_GRACE_SECONDS = 30.0
"""How long the announcement waits for draft workers once a target is there."""


async def _serve(config: CoordinatorConfig) -> None:
    coordinator = Coordinator(config, Vocabulary.load(config.tokenizer))
    server = Server("coordinator", config.host, config.port)
    work = asyncio.create_task(coordinator.run())
    service = GenerationService(coordinator, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.grpc)
    try:
        await server.start()
        announcing = asyncio.create_task(_announce(coordinator, server))
        await server.run_until_stopped(exit_with_parent=config.exit_with_parent, drain=coordinator.drain)
        announcing.cancel()
    finally:
        work.cancel()


async def _announce(coordinator: Coordinator, server: Server) -> None:
    """Ready means that requests will be served, with speculation if it is configured.

    Without a target worker the health turns to NOT_SERVING; requests still wait for one to come back.
    """
    await coordinator.wait_until_ready(DRAFT_GRACE_SECONDS)
    await server.set_serving(coordinator.serving, [SERVICE])
    tune_interpreter()
    server.announce()
    log.info("the coordinator listens on %s", server.address)
    while True:
        await coordinator.readiness_changed.wait()
        coordinator.readiness_changed.clear()
        await server.set_serving(coordinator.serving, [SERVICE])


def run(config: CoordinatorConfig) -> None:
    """Serve until told to stop. Raises PacelineError when the coordinator cannot start."""
    configure_logging("coordinator")
    asyncio.run(_serve(config))
