"""Who may call what, by the certificate that a peer shows.

A certificate tells its holder's role by a DNS name among its subject alternative names:
`coordinator.paceline.internal` and so on. A DNS name, because it is the one thing that both ends can check:
a gRPC server is told the names in its client's certificate, but a gRPC client in Python is not told those
of its server, and can only demand one name in advance.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import grpc

from paceline.core.errors import PermissionDeniedError
from paceline.core.security.secret import WorkerSecret

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[Context, str], None]
"""Raises PacelineError to refuse a call; takes its context and its method's full name."""
DOMAIN: Final = "paceline.internal"
"""`.internal` is reserved for private use: no public authority certifies such a name."""


class PeerRole(enum.Enum):
    """What a certificate says its holder is."""

    COORDINATOR = "coordinator"
    TARGET = "target"
    DRAFT = "draft"
    CLIENT = "client"

    @property
    def dns_name(self) -> str:
        """The name that certificates of this role have."""
        return f"{self.value}.{DOMAIN}"


CALLERS: Final[Mapping[str, frozenset[PeerRole]]] = {
    "target": frozenset({PeerRole.COORDINATOR}),
    "draft": frozenset({PeerRole.COORDINATOR}),
    "coordinator": frozenset({PeerRole.CLIENT, PeerRole.COORDINATOR}),
}
"""Role of a server, to the roles that may call it."""

_HEALTH: Final = "/grpc.health.v1.Health/"
_HEALTH_PATHS: Final = frozenset({"/health", "/ping"})


def is_open(method: str) -> bool:
    """True for what needs neither role nor key: health, by gRPC's method or HTTP's path."""
    return method.startswith(_HEALTH) or method in _HEALTH_PATHS


def roles_of(names: Iterable[str]) -> frozenset[PeerRole]:
    """The roles that a certificate with these DNS names gives. No wildcards: a role is named in full."""
    given = {name.lower() for name in names}
    return frozenset(role for role in PeerRole if role.dns_name in given)


def check_call(server: str, names: Iterable[str], method: str) -> None:
    """Raises PermissionDeniedError unless a peer with these names may call `method` of a server of this role.

    Pure, and closed by default: a method that nobody thought of is one that needs the role.
    """
    if not is_open(method) and not roles_of(names) & CALLERS[server]:
        raise PermissionDeniedError("the certificate shown does not allow this call")


def names_of(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """The DNS names in a caller's certificate, which the handshake has verified."""
    found: Iterable[bytes] = context.auth_context().get("peer_dns", ())
    return [name.decode("utf-8", "replace") for name in found]


def role_check(server: str) -> Check:
    """`check_call` as what a ShieldInterceptor asks, for a server that demands certificates."""
    return lambda context, method: check_call(server, names_of(context), method)


def secret_check(secret: WorkerSecret) -> Check:
    """Demands the secret on every method but health, unknown methods included."""

    def check(context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        if not is_open(method):
            secret.check(context.invocation_metadata() or ())

    return check


def all_of(*checks: Check) -> Check:
    """Makes each check in turn."""

    def check(context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        for each in checks:
            each(context, method)

    return check
