"""What a directory of workers is.

To add one: a file here with a class that has `watch` and `report`, and a line in registry.py.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class MemberState(enum.Enum):
    """What a listed worker is there for."""

    READY = "ready"
    """It takes sequences."""
    DRAINING = "draining"
    """It takes no new sequences and keeps those that it has."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as a directory lists it. What it serves, it says itself once it is connected."""

    role: str
    """`target` or `draft`."""
    address: str
    """host:port"""
    state: MemberState = MemberState.READY


class WorkerDirectory(Protocol):
    """Lists the workers of a coordinator."""

    def watch(self) -> AsyncIterator[Sequence[Member]]:
        """The whole membership, whenever it changes, beginning with the present one.

        No worker is listed twice in one membership. A worker that is missing gets no new sequences, and keeps
        its connection until the stream or its sequences end; so a directory that is wrong for a moment costs
        nothing. The iterator may end when nothing can change any more. A source that fails for a while is
        asked again here: an exception ends the coordinator.
        """

    def report(self, member: Member, refusal: str) -> None:
        """The coordinator cannot use this worker, and says why. It goes on trying while it is listed."""
