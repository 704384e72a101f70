"""Several asynchronous iterators read as one, and one that computes read beside the loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
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


async def beside(items: Iterable[T]) -> AsyncIterator[T]:
    """The same items. Those of an iterator are made in a thread, so that all else goes on meanwhile."""
    if not isinstance(items, Iterator):
        for item in items:
            yield item
        return
    while made := await asyncio.to_thread(_first, items):
        yield made[0]


def _first(items: Iterator[T]) -> list[T]:
    return list(itertools.islice(items, 1))
