"""Several asynchronous iterators read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def together(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items as they come, those of one source in order. Raises what the first failing source raises.

    No source is read ahead of the consumer by more than one item, so that a slow consumer is felt by all.
    """
    reading = {asyncio.ensure_future(_next(source)): source for source in sources}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source, items = reading.pop(task), task.result()
                if items:
                    reading[asyncio.ensure_future(_next(source))] = source
                    yield items[0]
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _next(source: AsyncIterator[T]) -> list[T]:
    """The next item, or none at the end: a task cannot carry StopAsyncIteration."""
    async for item in source:
        return [item]
    return []
