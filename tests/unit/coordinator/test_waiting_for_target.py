"""Waiting for a target, cancelled by the client's leaving or the timeout."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.app import Coordinator
from paceline.core.errors import UnavailableError


@pytest.mark.parametrize("turns", range(4))
async def test_cancelling_as_the_target_is_found_ends_the_wait(turns: int, coordinator: Coordinator) -> None:
    """Otherwise an answer would be generated for nobody."""
    waiting = asyncio.create_task(coordinator.wait_for_target())
    await asyncio.sleep(0)
    coordinator._target_found.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    over = waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert over or waiting.cancelled()


async def test_a_missing_target_is_awaited_for_the_recovery_timeout(coordinator: Coordinator) -> None:
    object.__setattr__(coordinator.config, "recovery_timeout", 0.0)
    with pytest.raises(UnavailableError, match="no target worker is available"):
        await coordinator.wait_for_target()
