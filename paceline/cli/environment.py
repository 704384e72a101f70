"""Environment variables: preparation before libraries are imported, and warnings about unknown ones.

This module must not import any library.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping

GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""Disables gRPC's event engine, which passes each message between threads before the completion queue.
Without it, the thread waiting for the queue polls the socket itself, which saves two hand-overs and a third
of a round trip (docs/decisions/0035-frames-through-unix-sockets.md)."""

_PORT = re.compile(r"PACELINE_(\w+_)?PORT")
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Beginning of an address that Kubernetes sets as NAME_PORT in every pod for each Service. A Service named
`paceline` would collide with the variable of `--port`."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the default of GRPC_EXPERIMENTS, which gRPC reads on import, and remove Kubernetes' variables."""
    environment.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    for name, value in list(environment.items()):
        if _PORT.fullmatch(name) and _SERVICE_LINK.match(value):
            del environment[name]


_KUBERNETES = re.compile(
    r"PACELINE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for a Service whose name begins with `paceline`."""
_NOT_OPTIONS = (
    "PACELINE_LOG_LEVEL",
    "PACELINE_WORKER_SECRET",
    # Used by the compose files.
    "PACELINE_GPU",
    "PACELINE_TARGET_GPU",
    "PACELINE_SECOND_TARGET_GPU",
    "PACELINE_DRAFT_GPU",
    "PACELINE_BIND",
    "PACELINE_MONITORING_BIND",
    "PACELINE_PROMETHEUS_PORT",
    "PACELINE_GRAFANA_PORT",
    "PACELINE_STOP_GRACE_PERIOD",
    "PACELINE_TORCH_INDEX",
    "PACELINE_CERTIFICATES",
    "PACELINE_KEYS",
)
_OTHERS = ("PACELINE_TEST_", "PACELINE_SOAK_")
"""Prefixes of variables of the project's tests."""


def unknown_variables(known: Iterable[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """A warning for each PACELINE_ variable without effect, with the probably intended name."""
    names = {*known, *_NOT_OPTIONS}
    return [
        f"{name} is set, but no option uses this variable{_meant(name, environment[name], names)}"
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
