"""Bounds of a gRPC port: message sizes, calls, connections, ages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PortBounds:
    """Bounds of one gRPC port. `message_bytes` applies to a message both compressed and uncompressed."""

    message_bytes: int = limits.MAX_MESSAGE_BYTES
    calls: int = limits.MAX_CALLS_PER_CONNECTION
    """Concurrent calls per connection; further calls wait at the sender."""
    connections: int = limits.MAX_WORKER_CONNECTIONS
    """Further connections are closed at once."""
    age_seconds: float | None = None
    """Age after which a connection takes no new calls and is closed after its last call; its client then
    opens another. None is no limit. This also bounds idle connections: gRPC's `max_connection_idle` would
    close them with an error that every Python client prints."""
    grace_seconds: float = 0.0
    """Time that running calls have after that age."""
    grows_windows: bool = True
    """Allow flow-control windows above 64 KiB per unread message."""

    @property
    def options(self) -> dict[str, Any]:
        """The bounds as gRPC options."""
        options: dict[str, Any] = {
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_concurrent_streams": self.calls,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.server_handshake_timeout_ms": round(limits.HANDSHAKE_SECONDS * 1000),
        }
        if self.age_seconds is not None:
            options["grpc.max_connection_age_ms"] = round(self.age_seconds * 1000)
            options["grpc.max_connection_age_grace_ms"] = round(self.grace_seconds * 1000)
        if not self.grows_windows:
            options["grpc.http2.bdp_probe"] = 0
        return options


def client_port(connections: int, longest_request_seconds: float) -> PortBounds:
    """Bounds of a client port. The grace period covers the longest request, so ageing never cuts a
    request."""
    return PortBounds(
        message_bytes=limits.MAX_CLIENT_MESSAGE_BYTES,
        calls=limits.MAX_CALLS_PER_CLIENT_CONNECTION,
        connections=connections,
        age_seconds=limits.CONNECTION_SECONDS,
        grace_seconds=longest_request_seconds,
        grows_windows=False,
    )
