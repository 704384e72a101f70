"""Splits commands or events into frames within the message bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from paceline.core import limits


def framed(items: Sequence[Any], make: Callable[[Sequence[Any]], Message]) -> Iterator[Message]:
    """Put all items in order into as few messages as the bounds allow.

    A single item always gets one message; its producer must bound its size.
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
