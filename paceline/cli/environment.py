"""Settings that a process must have before it loads a library. Nothing here may import one."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""gRPC's event engine hands each message from thread to thread before it reaches a completion queue. Without
it the thread that waits for the queue polls the socket itself: two hand-overs fewer, a third of a round trip
(docs/decisions/0026-fewer-threads-in-the-wire.md)."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set: gRPC reads its experiments once, when it is loaded."""
    environment.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
