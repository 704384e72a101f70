"""The directories by the scheme of an address, such as `dns` in `dns:targets.example:50152`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from coordinator.workers.directory.dns import DnsDirectory
from coordinator.workers.directory.interface import Member, WorkerDirectory
from coordinator.workers.directory.static import StaticDirectory
from paceline.core.validation import host_and_port

DIRECTORIES: Final[dict[str, Callable[[str, str], WorkerDirectory]]] = {"dns": DnsDirectory}
"""Each makes a directory from a role and what follows the scheme. Raises InvalidArgumentError. A replica of
`paceline.ray` adds its own."""


def open_directories(targets: Iterable[str], drafts: Iterable[str]) -> list[WorkerDirectory]:
    """A directory for each address that has a scheme of DIRECTORIES, after one of all other addresses.

    Raises InvalidArgumentError naming the list of an address that cannot be used.
    """
    static: list[Member] = []
    found: list[WorkerDirectory] = []
    for role, addresses in (("target", targets), ("draft", drafts)):
        for address in addresses:
            scheme, _, place = address.partition(":")
            if scheme in DIRECTORIES:
                found.append(DIRECTORIES[scheme](role, place))
            else:
                host_and_port(f"{role}s", address)
                static.append(Member(role, address))
    return [StaticDirectory(static), *found]
