"""The coordinator's process. This module must not import torch."""

from __future__ import annotations

import logging
import threading

from coordinator.api.grpc.auth import reload_on_hangup, warn_if_open
from coordinator.serving import Serving
from paceline.core.config import CoordinatorConfig
from paceline.rpc.server import event_loop
from paceline.rpc.server.parent_watch import leave_with_parent
from paceline.rpc.server.server import tune_interpreter
from paceline.telemetry.logs import configure_logging

log = logging.getLogger(__name__)


async def _serve(config: CoordinatorConfig) -> None:
    loaded = threading.Event()
    if config.exit_with_parent:
        leave_with_parent(unless=loaded)
    serving = Serving(config)
    server, http = serving.server, serving.http

    def started() -> None:
        server.heed_signals(exit_with_parent=config.exit_with_parent)
        loaded.set()
        warn_if_open(config)
        tell_of_client_certificates(config)
        reload_on_hangup(serving.gate, config)

    def ready() -> None:
        tune_interpreter()
        faces = {"http_address": http, "join_address": serving.join_server}
        server.announce(**{name: face.address for name, face in faces.items() if face is not None})
        log.info("the coordinator listens on %s", server.address)
        if http is not None:
            log.info("HTTP is served on %s", http.address)

    await serving.run(started, ready)


def tell_of_client_certificates(config: CoordinatorConfig) -> None:
    """Log that clients need a certificate: `PACELINE_TLS_CA` may have been meant for a client's command."""
    if config.tls is not None and config.tls.ca:
        log.info("clients must present a certificate of the authority in %s (tls_ca)", config.tls.ca)


def run(config: CoordinatorConfig) -> None:
    """Serve until told to stop. Raises PacelineError when the coordinator cannot start."""
    configure_logging("coordinator", config.log_format, named_by_parent=config.exit_with_parent)
    event_loop.run(_serve(config))
