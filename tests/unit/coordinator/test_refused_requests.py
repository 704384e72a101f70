"""Charges of refused requests, and counts of their sequences."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from coordinator.api.http.openai.generations import generating
from coordinator.app import Coordinator
from coordinator.auth import Gate, Principal, principal
from paceline.core.clock import ManualClock
from paceline.core.errors import AlreadyExistsError, CancelledError, InternalError, ResourceExhaustedError
from paceline.rpc.codec import Resumption
from tests.unit.coordinator.machines import make_call, pass_through

CALL = make_call(name="")
HELD = replace(CALL, request_id="r", resumable=True)


def calls() -> None:
    """Somebody whose key has two requests a minute makes a call."""
    principal.set(Principal("k", None, 2))


async def test_a_call_with_an_id_in_use_is_charged(served: Coordinator) -> None:
    """Whatever it says of resuming."""
    served.gate = Gate(clock=ManualClock())
    other = replace(HELD, prompt=(7, 8), resumption=Resumption((0,), ((),)))
    calls()
    async with served.generating(HELD):
        for refusal in (AlreadyExistsError, ResourceExhaustedError):
            calls()
            with pytest.raises(refusal):
                await pass_through(served, other)
        assert len(served.requests) == 1


async def test_a_resuming_call_is_not_charged(served: Coordinator) -> None:
    served.gate = Gate(clock=ManualClock())
    again = replace(HELD, resumption=Resumption((0,), ((),)))
    calls()
    async with served.generating(HELD), contextlib.AsyncExitStack() as readers:
        for _ in range(5):
            calls()
            await readers.enter_async_context(served.generating(again))
        calls()
        await readers.enter_async_context(served.generating(replace(CALL, request_id="another")))
        calls()
        with pytest.raises(ResourceExhaustedError):
            await readers.enter_async_context(served.generating(CALL))


async def test_a_request_refused_by_a_full_queue_is_not_aborted(served: Coordinator) -> None:
    """Choices that had found room are not counted as left by their client."""
    served.dispatcher._admission.max_running = served.dispatcher._admission.max_waiting = 1
    async with served.generating(CALL):
        two = replace(CALL, sampling=replace(CALL.sampling, n=2))
        with pytest.raises(ResourceExhaustedError):
            await pass_through(served, two)
        assert served.metrics.finished["abort"] == 0
        assert (served.dispatcher.running, served.dispatcher.waiting) == (1, 0)
    assert served.metrics.finished["abort"] == 1, "this one's client left"
    assert served.metrics.failed == {"RESOURCE_EXHAUSTED": 1}


async def test_earlier_prompts_of_a_refused_request_are_not_aborted(served: Coordinator) -> None:
    served.dispatcher._admission.max_running = served.dispatcher._admission.max_waiting = 1
    async with served.generating(CALL):
        with pytest.raises(ResourceExhaustedError):
            async with generating(served, [CALL, CALL]):
                pass
        assert served.metrics.finished["abort"] == 0
        assert (served.dispatcher.running, served.dispatcher.waiting) == (1, 0)


@pytest.mark.parametrize(("error", "aborted"), [(InternalError("it failed"), 0), (CancelledError("left"), 1)])
async def test_sequences_are_counted_by_how_their_call_ends(
    served: Coordinator, error: Exception, aborted: int
) -> None:
    with pytest.raises(type(error)):
        async with served.generating(CALL):
            raise error
    assert served.metrics.finished["abort"] == aborted
