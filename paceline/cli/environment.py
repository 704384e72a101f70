"""What the environment must hold before a process loads a library or reads its options from it.

Nothing here may import a library.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""gRPC's event engine hands each message from thread to thread before it reaches a completion queue. Without
it the thread that waits for the queue polls the socket itself: two hand-overs fewer, a third of a round trip
(docs/decisions/0026-fewer-threads-in-the-wire.md)."""

_PORT = re.compile(r"PACELINE_(\w+_)?PORT")
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""How Kubernetes begins the address of a Service in the variable NAME_PORT, which it sets in every pod of a
namespace: a Service that is named `paceline` has that of our option `--port`."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set, for gRPC reads its experiments once, when it is loaded; remove what is not meant
    for us."""
    environment.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    for name, value in list(environment.items()):
        if _PORT.fullmatch(name) and _SERVICE_LINK.match(value):
            del environment[name]
