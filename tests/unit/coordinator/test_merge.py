"""Several streams merged into one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from coordinator.requests.merge import beside, together


async def numbers(name: str, count: int, error: Exception | None = None) -> AsyncIterator[tuple[str, int]]:
    for number in range(count):
        await asyncio.sleep(0)
        yield name, number
    if error is not None:
        raise error


async def test_merged_items_keep_each_sources_order() -> None:
    counts = {"a": 5, "b": 0, "c": 2}
    items = [item async for item in together([numbers(name, count) for name, count in counts.items()])]
    for name, count in counts.items():
        assert [number for source, number in items if source == name] == list(range(count))
    assert [item async for item in together([])] == []


async def test_available_items_do_not_wait_for_other_sources() -> None:
    never = asyncio.Event()

    async def silent() -> AsyncIterator[tuple[str, int]]:
        await never.wait()
        yield "silent", 0

    merged = together([silent(), numbers("a", 3)])
    assert [await anext(merged) for _ in range(3)] == [("a", 0), ("a", 1), ("a", 2)]
    await merged.aclose()  # type: ignore[attr-defined]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_first_error_ends_all_sources() -> None:
    failing = numbers("b", 1, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        async for _ in together([numbers("a", 10**9), failing]):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_no_source_is_read_far_ahead() -> None:
    read: list[int] = []

    async def counted() -> AsyncIterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    merged = together([counted()])
    await anext(merged)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(read) <= 2
    await merged.aclose()  # type: ignore[attr-defined]


async def test_items_are_made_outside_the_loop() -> None:
    threads = []

    def made() -> Iterator[int]:
        for number in range(3):
            threads.append(threading.get_ident())
            yield number

    assert [item async for item in beside(made())] == [0, 1, 2]
    assert threading.get_ident() not in threads
    assert [item async for item in beside([])] == []
    assert [item async for item in beside(["at once"])] == ["at once"]


async def test_an_error_while_making_items_is_raised() -> None:
    def made() -> Iterator[int]:
        yield 1
        raise ValueError("no")

    items = beside(made())
    assert await anext(items) == 1
    with pytest.raises(ValueError, match="no"):
        await anext(items)
