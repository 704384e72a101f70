"""Faults in the middle of running streams: none ends before the fault, and affected ones are counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from harness.stacks import RunningStack
from harness.web import connect


class Reads(Protocol):
    """A stream that is read in a thread of its own."""

    @property
    def over(self) -> bool: ...

    def wait_for_tokens(self, count: int) -> None: ...

    def result(self) -> Any: ...


Stream = TypeVar("Stream", bound=Reads)


@contextlib.contextmanager
def mid_stream(
    stack: RunningStack, begin: Callable[[], Sequence[Stream]], tokens: int
) -> Iterator[Sequence[Stream]]:
    """Streams of the stack's target, each with that many tokens. While the block lasts it stands still.

    On a busy machine one may end before the target is stopped: then they begin anew.
    """
    while True:
        streams = begin()
        for stream in streams:
            stream.wait_for_tokens(tokens)
        with stack.standing_target():
            _settle(stack)
            if not any(stream.over for stream in streams):
                yield streams
                return
        for stream in streams:
            stream.result()


def _settle(stack: RunningStack) -> None:
    """Nothing more comes of the target: wait for what it had sent before to reach the coordinator."""
    (http,) = [*connect(stack.stack.http_address)]
    before = -1.0
    while (now := http.total("paceline:generation_tokens_total")) != before:
        before = now


def failovers(stack: RunningStack, role: str) -> float:
    """Sequences that lost the worker of this role while they ran, since the coordinator began."""
    (http,) = [*connect(stack.stack.http_address)]
    return http.total("paceline:failovers_total", f'role="{role}"')
