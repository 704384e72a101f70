"""Workers that are told to stop hand their sequences over: no stream notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from harness.commands import command
from harness.history import validate
from harness.log import Log
from harness.oracle import Ids
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator, own_worker, together
from harness.waiting import until
from harness.web import connect

from paceline.client import WorkerState
from tests.fault.streams import COUPLED, GREEDY, record, without_fault

LENGTH = 600
"""Long enough that streams still run when a worker has been told to stop."""


@dataclass(frozen=True)
class Fleet:
    """A coordinator with two workers of each role."""

    own: OwnCoordinator
    log: Log
    """Of the second workers."""
    targets: list[str]
    drafts: list[str]


@pytest.fixture(scope="module")
def fleet(faulty: RunningStack) -> Iterator[Fleet]:
    log, pair = Log(), faulty.pair
    with (
        own_worker("target", pair.target, log, num_blocks=512) as target,
        own_worker("draft", pair.draft, log, num_blocks=512) as draft,
    ):
        targets = [faulty.stack.address_of("target"), target]
        drafts = [faulty.stack.address_of("draft"), draft]
        with own_coordinator(pair, targets, drafts) as own:
            until(lambda: ready(own) == 4, "four workers")
            yield Fleet(own, log, targets, drafts)


def ready(own: OwnCoordinator) -> int:
    return sum(worker.state is WorkerState.READY for worker in own.client.status().workers)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_drained_worker_costs_no_token(faulty: RunningStack, fleet: Fleet, prompt: Ids, role: str) -> None:
    """Its streams go on at the other one, and it serves again when it has been replaced."""
    worker = (fleet.targets if role == "target" else fleet.drafts)[1]
    asked = [(prompt[i:], sampling) for i, sampling in enumerate((GREEDY, COUPLED, GREEDY, COUPLED))]
    expected = together([lambda a=a: without_fault(faulty, *a, LENGTH) for a in asked])
    # No two prompts have a prefix in common, so the targets share them evenly.
    streams = [record(fleet.own, ids, sampling, length=LENGTH) for ids, sampling in asked]
    for stream in streams:
        stream.wait_for_tokens(10)
    drained = command("drain", worker, "--address", fleet.own.address)
    assert (drained.stdout, drained.returncode) == (f"{worker} has stopped; sequences that it held: 2\n", 0)
    assert not any(stream.over for stream in streams)
    for stream, tokens in zip(streams, expected, strict=True):
        validate(stream.result(), tokens)
    assert lost(fleet.own) == 0
    until(lambda: ready(fleet.own) == 4, "the worker's successor")


def lost(own: OwnCoordinator) -> float:
    """Sequences whose worker went away under them."""
    address = own.client.status().coordinator.http_address
    (http,) = [*connect(address)]
    return http.total("paceline:failovers_total")


def test_a_worker_without_others_keeps_its_sequences(faulty: RunningStack, prompt: Ids) -> None:
    """Those that end within the time for that end there."""
    with (
        own_worker("target", faulty.pair.target, num_blocks=512, handover_timeout=60.0) as target,
        own_coordinator(faulty.pair, [target]) as own,
    ):
        expected = without_fault(faulty, prompt, GREEDY, LENGTH)
        stream = record(own, prompt, GREEDY, 0, LENGTH)
        stream.wait_for_tokens(10)
        drained = command("drain", target, "--address", own.address)
        assert drained.stdout == f"{target} has stopped; sequences that it held: 1\n"
        assert stream.over
        validate(stream.result(), expected)


def test_an_unknown_worker_is_named(fleet: Fleet) -> None:
    refused = command("drain", "nobody:1", "--address", fleet.own.address)
    assert refused.returncode != 0
    assert "WORKER: there is no nobody:1; there are target" in refused.stderr
