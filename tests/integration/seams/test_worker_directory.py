"""A fleet that changes under running streams: `changing_directory` in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.history import Recording, validate
from harness.stacks import OwnCoordinator, own_coordinator, own_worker
from harness.waiting import HANG, until
from harness.web import Http, connect

from paceline.client import WorkerState

if TYPE_CHECKING:
    from harness.pair import Pair

pytestmark = pytest.mark.timeout(300)
PROMPT = [40, 41, 42, 43, 44, 45]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}, {"temperature": 0.8, "seed": 12}]
LENGTH = 200


class Members:
    """The file that the directory reads."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.write()

    def write(self, *addresses: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(addresses))
        new.rename(self._file)


def parameters(sampling: dict[str, float]) -> dict[str, float]:
    return {"max_tokens": LENGTH, "ignore_eos": True, **sampling}


def begin(own: OwnCoordinator) -> list[Recording]:
    """Streams that speculate, each well under way."""
    speculation = {"num_speculative_tokens": 3}
    streams = [Recording(own.address, PROMPT, parameters(each), speculation) for each in SAMPLINGS]
    for stream in streams:
        stream.wait_for_tokens(20)
    return streams


def plain(own: OwnCoordinator) -> list[tuple[int, ...]]:
    """What a target alone says."""
    return [
        tuple(
            own.client.generate(
                PROMPT, parameters(each), speculation={"num_speculative_tokens": 0}, timeout=HANG
            ).token_ids
        )
        for each in SAMPLINGS
    ]


def wait_for_fleet(own: OwnCoordinator, *addresses: str) -> None:
    """Until the status shows these workers and no others, all of them ready."""

    def shown() -> bool:
        workers = own.client.status().workers
        return [worker.address for worker in workers if worker.state is WorkerState.READY] == [
            *addresses
        ] and len(workers) == len(addresses)

    until(shown, f"a fleet of {addresses}")


@pytest.fixture
def members(tmp_path: Path) -> Members:
    return Members(tmp_path / "members")


def test_streams_survive_a_changing_fleet(
    pair_paths: Pair,
    toys_known: Callable[..., AbstractContextManager[None]],
    members: Members,
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        one, two = (
            stack.enter_context(own_worker("target", pair_paths.target, num_blocks=512)) for _ in range(2)
        )
        members.write(one)
        stack.enter_context(toys_known("changing_directory"))
        own = stack.enter_context(own_coordinator(pair_paths, [f"changing:{tmp_path / 'members'}"]))
        (http,) = connect(own.client.status().coordinator.http_address)
        wait_for_fleet(own, one)
        (worker,) = own.client.status().workers
        expected = plain(own)

        # One is added, the first is dropped and killed: its streams go on at the other one.
        streams = begin(own)
        os.kill(worker.info.process_id, signal.SIGSTOP)
        members.write(one, two)
        until(lambda: ready(http) == 2, "the second target")
        members.write(two)
        short = own.client.generate(
            PROMPT, {"max_tokens": 5, "temperature": 0, "ignore_eos": True}, timeout=HANG
        )
        assert tuple(short.token_ids) == expected[0][:5], "the one that stands still gets no new sequence"
        unfinished = sum(not stream.over for stream in streams)
        assert http.total("paceline:worker_sequences", f'"{one}"') == unfinished
        assert failovers(http) == 0, "to be missing from a list costs nothing"
        os.kill(worker.info.process_id, signal.SIGKILL)
        for stream, tokens in zip(streams, expected, strict=True):
            validate(stream.result(), tokens)
        assert failovers(http) == unfinished
        wait_for_fleet(own, two)

        # A target that is dropped while it serves ends what it has.
        streams = begin(own)
        members.write()
        for stream, tokens in zip(streams, expected, strict=True):
            validate(stream.result(), tokens)
        assert failovers(http) == unfinished
        wait_for_fleet(own)
        members.write(f"drain {two}")
        wait_for_fleet(own, two)
        assert ready(http) == 1
        members.write(two)
        assert plain(own) == expected


def ready(http: Http) -> float:
    """Targets that are connected."""
    return http.total("paceline:workers", 'role="target",state="ready"')


def failovers(http: Http) -> float:
    """Sequences that lost their target."""
    return http.total("paceline:failovers_total", 'role="target"')
