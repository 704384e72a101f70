"""Merges asynchronous iterators, and runs an iterator that computes in a thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def together(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield items as they arrive; items of one source stay in order. Raises the first error of a source.

    No source is read more than one item ahead of the consumer, so a slow consumer slows every source.
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
    """The next item in a list; an empty list at the end, since a task cannot carry StopAsyncIteration."""
    async for item in source:
        return [item]
    return []


async def beside(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the same items. An iterator is advanced in a thread, so that the event loop goes on."""
    if not isinstance(items, Iterator):
        for item in items:
            yield item
        return
    while made := await asyncio.to_thread(_first, items):
        yield made[0]


def _first(items: Iterator[T]) -> list[T]:
    return list(itertools.islice(items, 1))
