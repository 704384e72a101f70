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

from paceline.client import Client

PROMPT = "import os\n\n\ndef main("
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "top_p": 0.95, "seed": 77},
    "penalised": {
        "temperature": 0.8,
        "seed": 78,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "logprobs": 1,
        "min_tokens": 250,
    },
}
LENGTH = 300


def read(client: Client, sampling: Mapping[str, Any]) -> Reading:
    return Reading(client, PROMPT, {"max_tokens": LENGTH, "ignore_eos": True, **sampling})


@pytest.fixture(scope="module")
def asked(faulty: RunningStack) -> Sequence[Asked]:
    """With the answers of a run without faults."""
    return undisturbed(faulty, 48)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_48_streams_survive_a_coordinator_restart(
    faulty: RunningStack, asked: Sequence[Asked], number: signal.Signals
) -> None:
    """A client with default settings; 16 streams begin after the coordinator was killed."""
    counts = restart(faulty, number, asked, late=16)
    assert counts == Counter(streams=64, lost=0, doubled=0, different=0, resumed=counts["resumed"])
    assert counts["resumed"] >= 48


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_streams_survive_a_coordinator_crash(faulty: RunningStack, number: signal.Signals) -> None:
    """Killed in mid-stream, and started again on the same port: the same tokens, each once.

    One that is told to stop may let streams of this length end; whichever way it is, nothing is missing.
    """
    wholes = {
        name: faulty.client.generate(
            PROMPT, {"max_tokens": LENGTH, "ignore_eos": True, **sampling}, timeout=HANG
        )
        for name, sampling in SAMPLINGS.items()
    }
    with mid_stream(faulty, lambda: [read(faulty.client, s) for s in SAMPLINGS.values()], 5) as readings:
        ended = faulty.stack.kill("coordinator", number)
    for name, reading in zip(SAMPLINGS, readings, strict=True):
        result = reading.result()
        whole = wholes[name]
        validate(history_of(reading.chunks), whole.token_ids)
        assert result.token_ids == whole.token_ids
        assert "".join(chunk.text for chunk in reading.chunks) == result.text == whole.text
        assert result.usage == whole.usage
        if whole.logprobs is not None:
            assert [list(position) for position in result.logprobs or ()] == [
                list(position) for position in whole.logprobs
            ]
        if number is signal.SIGKILL:
            assert reading.num_resumes >= 1
    faulty.stack.wait_for_restart("coordinator", after=ended, timeout=HANG)


def test_a_stream_survives_two_coordinator_crashes(faulty: RunningStack) -> None:
    sampling = SAMPLINGS["coupled"]
    whole = faulty.client.generate(
        PROMPT, {"max_tokens": LENGTH, "ignore_eos": True, **sampling}, timeout=HANG
    )

    def killed_once() -> list[Reading]:
        with mid_stream(faulty, lambda: [read(faulty.client, sampling)], 40) as readings:
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
