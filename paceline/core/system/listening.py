"""Whether a process could listen where it is told to, asked of the system before anything is loaded."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from paceline.core.errors import InvalidArgumentError


def check_ports(host_field: str, host: str, ports: Mapping[str, int]) -> None:
    """That this machine has the host, and that each port of it is free; 0 is.

    `ports` by the names of their fields. Raises InvalidArgumentError naming the field. Another process may
    still take a port before it is bound in earnest.
    """
    for field, port in {host_field: 0, **ports}.items():
        _check_port(host_field, host, field, port)


def _check_port(host_field: str, host: str, field: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise InvalidArgumentError(
            host_field, f"{host} is not known here ({reason}); 127.0.0.1 serves this machine, 0.0.0.0 all"
        ) from None
    tried = [_bind(family, kind, address) for family, kind, _, _, address in found]
    failures = [failure for failure in tried if failure is not None]
    where = f"{host}:{port}"
    for failure in failures:
        if failure.errno == errno.EADDRINUSE:
            raise InvalidArgumentError(
                field, f"{where} is in use; take another port, or 0 for a free one, or end what listens there"
            )
        if failure.errno == errno.EACCES:
            raise InvalidArgumentError(field, f"{where} is for the superuser: ports below 1024 mostly are")
    if len(failures) == len(found):
        raise InvalidArgumentError(
            host_field,
            f"{host} is no address of this machine ({failures[0].strerror}); 127.0.0.1 serves this machine, "
            "0.0.0.0 all",
        )


def _bind(family: int, kind: int, address: tuple[object, ...]) -> OSError | None:
    """Why it cannot be bound; None where it can."""
    try:
        with socket.socket(family, kind) as tried:
            # As gRPC binds it: what a process that has ended left behind is in nobody's way.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            tried.bind(address)
    except OSError as error:
        return error
    return None
