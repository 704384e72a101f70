"""A worker's readiness follows its engine thread's progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.rpc.streams import worker_stream
from paceline.rpc.streams.worker_stream import MAX_IDLE_SECONDS, watch_progress

STUCK = MAX_IDLE_SECONDS + 1
SECONDS = 30.0


class FakeEngine:
    """Moves and stands still as told."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = [*seconds]
        self.looked = asyncio.Event()
        """All was seen, and what came of it was told."""

    @property
    def seconds_since_progress(self) -> float:
        if len(self._seconds) == 1:
            self.looked.set()
            return self._seconds[0]
        return self._seconds.pop(0)


async def test_a_stuck_engine_is_not_ready_until_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is reported once."""
    monkeypatch.setattr(worker_stream, "WATCH_SECONDS", 0)
    told: list[bool] = []

    async def set_serving(serving: bool) -> None:
        told.append(serving)

    engine: Any = FakeEngine(0.0, STUCK, STUCK, 0.0, 0.0)
    watching = asyncio.create_task(watch_progress(engine, set_serving))
    async with asyncio.timeout(SECONDS):
        await engine.looked.wait()
    watching.cancel()
    await asyncio.wait([watching])
    assert told == [False, True]
