"""Authorisation of calls by the peer's certificate.

A certificate contains its holder's role as a DNS name among its subject alternative names, such as
`coordinator.paceline.internal`. DNS names are the only thing that both ends can check: a gRPC server can read
the names in its client's certificate, but a gRPC client in Python cannot read those of its server and can
only require one name in advance.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote

import grpc

from paceline.core.errors import PermissionDeniedError
from paceline.core.security.secret import WorkerSecret
from paceline.rpc.security.credentials import is_loopback

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[Context, str], None]
"""Takes a call's context and its method's full name; raises PacelineError to refuse the call."""
DOMAIN: Final = "paceline.internal"
"""`.internal` is reserved for private use, so no public authority certifies such a name."""


class PeerRole(enum.Enum):
    """The role of a certificate's holder."""

    COORDINATOR = "coordinator"
    TARGET = "target"
    DRAFT = "draft"
    CLIENT = "client"

    @property
    def dns_name(self) -> str:
        """The DNS name in certificates of this role."""
        return f"{self.value}.{DOMAIN}"


CALLERS: Final[Mapping[str, frozenset[PeerRole]]] = {
    "target": frozenset({PeerRole.COORDINATOR}),
    "draft": frozenset({PeerRole.COORDINATOR}),
    "coordinator": frozenset({PeerRole.CLIENT, PeerRole.COORDINATOR}),
    "fleet": frozenset({PeerRole.TARGET, PeerRole.DRAFT}),
}
"""The roles that may call a server, by the server's role."""

_HEALTH: Final = "/grpc.health.v1.Health/"
_HEALTH_PATHS: Final = frozenset({"/health", "/ping"})


def is_open(method: str) -> bool:
    """True for methods and paths without authentication: health checks by gRPC method or HTTP path."""
    return method.startswith(_HEALTH) or method in _HEALTH_PATHS


def roles_of(names: Iterable[str]) -> frozenset[PeerRole]:
    """The roles of a certificate with these DNS names. Wildcards are not supported."""
    given = {name.lower() for name in names}
    return frozenset(role for role in PeerRole if role.dns_name in given)


def check_call(server: str, names: Iterable[str], method: str) -> None:
    """Raises PermissionDeniedError unless a peer with these names may call `method` of a server of this role.

    Closed by default: an unknown method requires the role.
    """
    if not is_open(method) and not roles_of(names) & CALLERS[server]:
        raise PermissionDeniedError("the caller's certificate does not allow this call")


def names_of(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """The DNS names in the caller's certificate, which the handshake has verified."""
    found: Iterable[bytes] = context.auth_context().get("peer_dns", ())
    return [name.decode("utf-8", "replace") for name in found]


def is_local_call(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """True for a caller on this machine: by a loopback address or a Unix socket.

    A proxy on this machine makes all of its callers local.
    """
    kind, _, place = unquote(context.peer()).partition(":")
    return kind == "unix" or (kind in ("ipv4", "ipv6") and is_loopback(place.rpartition(":")[0]))


def role_check(server: str) -> Check:
    """`check_call` as a Check, for a server that requires client certificates."""
    return lambda context, method: check_call(server, names_of(context), method)


def secret_check(secret: WorkerSecret) -> Check:
    """Requires the secret on every method except health, including unknown methods."""

    def check(context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        if not is_open(method):
            secret.check(context.invocation_metadata() or ())

    return check


def all_of(*checks: Check) -> Check:
    """Runs all checks in order."""

    def check(context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        for each in checks:
            each(context, method)

    return check
