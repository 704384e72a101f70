"""What the environment must hold before a process loads a library or reads its options from it.

Nothing here may import a library.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping

GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""gRPC's event engine hands each message from thread to thread before it reaches a completion queue. Without
it the thread that waits for the queue polls the socket itself: two hand-overs fewer, a third of a round trip
(docs/decisions/0035-frames-through-unix-sockets.md)."""

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


_KUBERNETES = re.compile(
    r"PACELINE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes sets in every pod for a Service whose name begins with `paceline`."""
_NOT_OPTIONS = (
    "PACELINE_LOG_LEVEL",
    "PACELINE_WORKER_SECRET",
    # docker-compose.yml and deploy/compose.secure.yml read these, for docker compose.
    "PACELINE_TARGET_GPU",
    "PACELINE_DRAFT_GPU",
    "PACELINE_BIND",
    "PACELINE_STOP_GRACE_PERIOD",
    "PACELINE_TORCH_INDEX",
    "PACELINE_CERTIFICATES",
    "PACELINE_KEYS",
)
_OTHERS = ("PACELINE_TEST_", "PACELINE_SOAK_")
"""What variables of the project's own tests begin with."""


def unknown_variables(known: Iterable[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """A warning for each variable of our prefix that sets nothing, with what it was probably meant to be."""
    names = {*known, *_NOT_OPTIONS}
    return [
        f"{name} is set, and no option has this variable{_meant(name, environment[name], names)}"
        for name in sorted(environment)
        if name.startswith("PACELINE_")
        and name not in names
        and not name.startswith(_OTHERS)
        and not _KUBERNETES.fullmatch(name)
    ]


def _meant(name: str, value: str, known: Collection[str]) -> str:
    positive = name.replace("PACELINE_NO_", "PACELINE_", 1)
    if positive != name and positive in known:
        opposite = "true" if value.lower() in ("0", "false", "no", "off", "f", "n") else "false"
        return f": write {positive}={opposite}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f": did you mean {near[0]}?" if near else ""
