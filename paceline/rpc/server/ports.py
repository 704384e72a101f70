"""What a port takes from its peers: sizes, numbers, times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PortBounds:
    """Of one gRPC port. A message of a call counts against `message_bytes` compressed and as it is."""

    message_bytes: int = limits.MAX_MESSAGE_BYTES
    calls: int = limits.MAX_CALLS_PER_CONNECTION
    """Of one connection at a time; one more waits at its sender."""
    connections: int = limits.MAX_WORKER_CONNECTIONS
    """One more is closed at once."""
    age_seconds: float | None = None
    """A connection that is older takes no new calls, and is closed when its last one has ended; its client
    opens another for the next. None is any age. It bounds idle connections too: gRPC's own bound on these
    (`max_connection_idle`) closes them with an error, which every client in Python prints."""
    grace_seconds: float = 0.0
    """How long calls of a connection that is too old may go on."""
    grows_windows: bool = True
    """Let clients send more than 64 KiB of a message before it is read, as their connection allows."""

    @property
    def options(self) -> dict[str, Any]:
        """As gRPC calls them."""
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
    """A port that clients reach. No connection is cut under a request, however long that takes."""
    return PortBounds(
        message_bytes=limits.MAX_CLIENT_MESSAGE_BYTES,
        calls=limits.MAX_CALLS_PER_CLIENT_CONNECTION,
        connections=connections,
        age_seconds=limits.CONNECTION_SECONDS,
        grace_seconds=longest_request_seconds,
        grows_windows=False,
    )
