"""The addresses behind a host name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a host name, IPv6 ones in brackets. Raises OSError."""


async def resolve(host: str) -> Sequence[str]:
    """Ask the system's resolver."""
    return _addresses(await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM))


def resolve_blocking(host: str) -> Sequence[str]:
    """The same for threads without an event loop."""
    return _addresses(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def _addresses(found: Iterable[tuple[Any, ...]]) -> Sequence[str]:
    """IPv6 addresses count only if there are no others: one entry a process."""
    addresses = [(family, str(address[0])) for family, *_, address in found]
    v4 = [address for family, address in addresses if family == socket.AF_INET]
    return v4 or [f"[{address}]" for _, address in addresses]
