"""The interface of a worker directory.

To add a directory, write a class with `watch` and `report` in a file here, and add a line to registry.py.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class MemberState(enum.Enum):
    """Whether a listed worker takes new sequences."""

    READY = "ready"
    """The worker takes new sequences."""
    DRAINING = "draining"
    """The worker takes no new sequences and keeps its present ones."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as a directory lists it. Once connected, the worker itself reports which model it serves."""

    role: str
    """`target` or `draft`."""
    address: str
    """host:port"""
    state: MemberState = MemberState.READY


class WorkerDirectory(Protocol):
    """Lists the workers of a coordinator."""

    def watch(self) -> AsyncIterator[Sequence[Member]]:
        """Yield the complete list of workers: the present list first, then a new one after each change.

        A list names each worker at most once. A worker that is not listed gets no new sequences. It keeps its
        connection until its stream or its sequences end, so a list that is wrong for a moment does no harm.
        The iterator may end if the list can no longer change. An exception from it ends the coordinator, so
        the directory must retry a source that fails.
        """

    def report(self, member: Member, refusal: str) -> None:
        """Called if the coordinator cannot use a worker. It keeps trying while the worker is listed."""
