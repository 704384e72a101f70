"""The coordinator dies: a client of the SDK goes on by itself with the next one, and misses nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from harness.history import validate
from harness.mid_stream import mid_stream
from harness.resumed import history_of
from harness.stacks import RunningStack
from harness.waiting import HANG

from paceline.client import Client, GenerationChunk, GenerationResult

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


class Reading:
    """A stream of the SDK in a thread of its own."""

    def __init__(self, address: str, sampling: Mapping[str, Any]) -> None:
        self.chunks: list[GenerationChunk] = []
        self._client = Client(address, max_resumes=60)
        parameters = {"max_tokens": LENGTH, "ignore_eos": True, **sampling}
        self._stream = self._client.stream(
            PROMPT, parameters, speculation={"num_speculative_tokens": 4}, timeout=HANG
        )
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                with self._changed:
                    self.chunks.append(chunk)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """True when nothing more will come."""
        return self._over

    def wait_for_tokens(self, count: int) -> None:
        """Until that many are there. Fails if the stream ends before."""

        def enough() -> bool:
            return sum(len(chunk.token_ids) for chunk in self.chunks) >= count

        with self._changed:
            self._changed.wait_for(lambda: self._over or enough(), HANG)
            assert enough(), f"ended or hung early: {self._error!r}"

    def result(self) -> tuple[GenerationResult, int]:
        """The whole, and how often it was asked for again."""
        self._thread.join(HANG)
        self._client.close()
        assert not self._thread.is_alive(), "the stream does not end"
        if self._error is not None:
            raise self._error
        assert self._stream.result is not None
        return self._stream.result, self._stream.num_resumes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_streams_survive_their_coordinator(faulty: RunningStack, number: signal.Signals) -> None:
    """Killed in mid-stream, and started again on the same port: the same tokens, each once.

    One that is told to stop lets streams of this length end; whichever way it is, nothing is missing.
    """
    wholes = {
        name: faulty.client.generate(
            PROMPT, {"max_tokens": LENGTH, "ignore_eos": True, **sampling}, timeout=HANG
        )
        for name, sampling in SAMPLINGS.items()
    }
    with mid_stream(faulty, lambda: [Reading(faulty.address, s) for s in SAMPLINGS.values()], 5) as readings:
        ended = faulty.stack.kill("coordinator", number)
    for name, reading in zip(SAMPLINGS, readings, strict=True):
        result, resumes = reading.result()
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
            assert resumes >= 1
    faulty.stack.wait_for_restart("coordinator", after=ended, timeout=HANG)


def test_a_stream_survives_two_deaths(faulty: RunningStack) -> None:
    sampling = SAMPLINGS["coupled"]
    whole = faulty.client.generate(
        PROMPT, {"max_tokens": LENGTH, "ignore_eos": True, **sampling}, timeout=HANG
    )

    def killed_once() -> list[Reading]:
        with mid_stream(faulty, lambda: [Reading(faulty.address, sampling)], 40) as readings:
            killed = faulty.stack.kill("coordinator", signal.SIGKILL)
        faulty.stack.wait_for_restart("coordinator", after=killed, timeout=HANG)
        return [*readings]

    with mid_stream(faulty, killed_once, 120) as (reading,):
        killed = faulty.stack.kill("coordinator", signal.SIGKILL)
    faulty.stack.wait_for_restart("coordinator", after=killed, timeout=HANG)
    result, resumes = reading.result()
    assert resumes >= 2
    validate(history_of(reading.chunks), whole.token_ids)
    assert (result.token_ids, result.text) == (whole.token_ids, whole.text)
