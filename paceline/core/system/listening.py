"""A check, before any model is loaded, that a process can listen on its ports."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from paceline.core.errors import InvalidArgumentError


def check_ports(host_field: str, host: str, ports: Mapping[str, int]) -> None:
    """Checks that the host belongs to this machine and each port is free; port 0 always is.

    `ports` is keyed by field name. Raises InvalidArgumentError naming the field. Another process may still
    take a port before this one binds it.
    """
    for field, port in {host_field: 0, **ports}.items():
        _check_port(host_field, host, field, port)


def _check_port(host_field: str, host: str, field: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a valid host name"
        raise InvalidArgumentError(
            host_field, f"{host} is unknown ({reason}); use 127.0.0.1 for this machine only, 0.0.0.0 for all"
        ) from None
    tried = [_bind(family, kind, address) for family, kind, _, _, address in found]
    failures = [failure for failure in tried if failure is not None]
    where = f"{host}:{port}"
    for failure in failures:
        if failure.errno == errno.EADDRINUSE:
            raise InvalidArgumentError(
                field, f"{where} is in use; choose another port, or 0 for a free one, or stop its listener"
            )
        if failure.errno == errno.EACCES:
            raise InvalidArgumentError(
                field, f"{where} requires superuser rights, as most ports below 1024 do"
            )
    if len(failures) == len(found):
        raise InvalidArgumentError(
            host_field,
            f"{host} is not an address of this machine ({failures[0].strerror}); use 127.0.0.1 for this "
            "machine only, 0.0.0.0 for all",
        )


def _bind(family: int, kind: int, address: tuple[object, ...]) -> OSError | None:
    """The error of a trial bind; None if it succeeds."""
    try:
        with socket.socket(family, kind) as tried:
            # As gRPC does: connections left over from an ended process do not block the port.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            tried.bind(address)
    except OSError as error:
        return error
    return None
