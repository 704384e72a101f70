"""The coordinator dies: a client of the SDK resumes with the next one and misses nothing."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from harness.history import validate
from harness.mid_stream import mid_stream
from harness.reading import Reading
from harness.restarting import Asked, restart, undisturbed
from harness.resumed import history_of
from harness.stacks import RunningStack
from harness.waiting import HANG

PROMPT = "import os\n\n\ndef main("
SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "seed": 77,
    "max_tokens": 300,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def asked(faulty: RunningStack) -> Sequence[Asked]:
    """With the answers of a run without faults."""
    return undisturbed(faulty.client, 48)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_48_streams_survive_a_coordinator_restart(
    faulty: RunningStack, asked: Sequence[Asked], number: signal.Signals
) -> None:
    """A client with default settings; 16 streams begin after the coordinator was killed."""
    counts = restart(faulty, number, asked, late=16)
    assert counts == Counter(streams=64, lost=0, doubled=0, different=0, resumed=counts["resumed"])
    assert counts["resumed"] >= 48


def test_a_stream_survives_two_coordinator_crashes(faulty: RunningStack) -> None:
    whole = faulty.client.generate(PROMPT, SAMPLING, timeout=HANG)

    def killed_once() -> list[Reading]:
        with mid_stream(faulty, lambda: [Reading(faulty.client, PROMPT, SAMPLING)], 40) as readings:
            killed = faulty.stack.kill("coordinator", signal.SIGKILL)
        faulty.stack.wait_for_restart("coordinator", after=killed, timeout=HANG)
        return [*readings]

    with mid_stream(faulty, killed_once, 120) as (reading,):
        killed = faulty.stack.kill("coordinator", signal.SIGKILL)
    faulty.stack.wait_for_restart("coordinator", after=killed, timeout=HANG)
    result = reading.result()
    assert reading.num_resumes >= 2
    validate(history_of(reading.chunks), whole.token_ids)
    assert (result.token_ids, result.text) == (whole.token_ids, whole.text)
