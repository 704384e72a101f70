"""The addresses behind a host name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""Seconds between two queries. The system's resolver does not tell how long an answer is valid."""

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a host name, IPv6 ones in brackets. Raises OSError."""


async def resolve(host: str) -> Sequence[str]:
    """Ask the system's resolver."""
    return _addresses(await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM))


def resolve_blocking(host: str) -> Sequence[str]:
    """The same for threads without an event loop."""
    return _addresses(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


async def follow(host: str, port: int, resolve: Resolve, ask_seconds: float) -> AsyncIterator[Sequence[str]]:
    """Yield host:port of each address behind a name, none before it is known, and again at each change.

    A name that cannot be resolved for a moment keeps its last addresses.
    """
    listed: Sequence[str] | None = None
    failed = False
    while True:
        try:
            found = [f"{address}:{port}" for address in sorted(set(await resolve(host)))]
            failed = False
        except OSError as error:
            if not failed:
                log.warning("%s cannot be resolved, asking again: %s", host, error)
            failed, found = True, [*(listed or ())]
        if found != listed:
            listed = found
            yield listed
        await asyncio.sleep(ask_seconds)


def _addresses(found: Iterable[tuple[Any, ...]]) -> Sequence[str]:
    """IPv6 addresses count only if there are no others: one entry a process."""
    addresses = [(family, str(address[0])) for family, *_, address in found]
    v4 = [address for family, address in addresses if family == socket.AF_INET]
    return v4 or [f"[{address}]" for _, address in addresses]
