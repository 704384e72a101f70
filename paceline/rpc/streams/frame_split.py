"""How many messages a list of commands or events takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from paceline.core import limits


def framed(items: Sequence[Any], make: Callable[[Sequence[Any]], Message]) -> Iterator[Message]:
    """All items in order, in one message where it holds them, else in several.

    One that is alone has a message of its own, however large: who makes it bounds it.
    """
    if len(items) == 1:
        yield make(items)
        return
    if len(items) <= limits.MAX_COMMANDS_PER_FRAME:
        message = make(items)
        if message.ByteSize() <= limits.MAX_MESSAGE_BYTES:
            yield message
            return
    middle = len(items) // 2
    yield from framed(items[:middle], make)
    yield from framed(items[middle:], make)
