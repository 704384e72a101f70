"""Workers join a coordinator by themselves, serve, leave, and are refused by name. Real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.commands import command
from harness.history import validate
from harness.log import Log
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import OwnCoordinator, own_coordinator, own_worker
from harness.tiers import mostly_full
from harness.waiting import HANG, until

from paceline.client import WorkerState
from tests.fault.streams import COUPLED, LENGTH, record

SAMPLING = {"max_tokens": LENGTH, "ignore_eos": True, **COUPLED}


@dataclass(frozen=True)
class Joinable:
    """A coordinator with one static target, and the port to join it."""

    own: OwnCoordinator
    target: str
    port: str
    pair: Pair

    def states(self) -> dict[str, WorkerState]:
        return {worker.address: worker.state for worker in self.own.client.status().workers}

    def until(self, address: str, state: WorkerState | None) -> None:
        """None: the worker is listed no longer."""
        until(lambda: self.states().get(address) is state, f"{address} being {state}")


@pytest.fixture(scope="module")
def joinable(pair_paths: Pair) -> Iterator[Joinable]:
    with (
        own_worker("target", pair_paths.target, num_blocks=256) as target,
        own_coordinator(pair_paths, [target], join_port=0) as own,
    ):
        (line,) = own.log.find("workers may join on")
        found = re.search(r"127\.0\.0\.1:\d+", line)
        assert found is not None
        yield Joinable(own, target, found.group(), pair_paths)


def test_workers_that_join_serve_until_they_leave(joinable: Joinable, oracle: Oracle) -> None:
    """A drained static target hands its streams over to one that joined."""
    prompt = oracle.encode(SOURCE)[:48]
    expected = joinable.own.client.generate(
        prompt, SAMPLING, speculation={"num_speculative_tokens": 0}, timeout=HANG
    ).token_ids
    with (
        own_worker("draft", joinable.pair.draft, join=(joinable.port,)) as draft,
        own_worker("target", joinable.pair.target, join=(joinable.port,), num_blocks=256) as target,
    ):
        joinable.until(draft, WorkerState.READY)
        joinable.until(target, WorkerState.READY)
        streams = [record(joinable.own, prompt, COUPLED) for _ in range(2)]
        for stream in streams:
            stream.wait_for_tokens(10)
        drained = command("drain", joinable.target, "--address", joinable.own.address)
        assert drained.returncode == 0
        histories = [stream.result() for stream in streams]
        for history in histories:
            validate(history, expected)
        assert all(h.finished.speculative_decoding.num_accepted_draft_tokens for h in histories)
        joinable.until(joinable.target, WorkerState.READY)
    joinable.until(draft, None)
    joinable.until(target, None)


@pytest.mark.parametrize(
    ("model", "refusal"),
    mostly_full([("embedded:target@2", "model_fingerprint is"), ("draft", "model_fingerprint is")], count=1),
)
def test_a_joined_target_of_another_model_is_refused(joinable: Joinable, model: str, refusal: str) -> None:
    log = Log()
    path = joinable.pair.draft if model == "draft" else Path(model)
    with own_worker("target", path, log, join=(joinable.port,)) as worker:
        joinable.until(worker, WorkerState.REFUSED)
        until(lambda: log.find("cannot use this worker"), "the worker's own line")
        assert refusal in log.find("cannot use this worker")[0]
        assert joinable.states()[joinable.target] is WorkerState.READY
        result = joinable.own.client.generate([5, 6, 7], {"max_tokens": 3}, timeout=HANG)
        assert len(result.token_ids) == 3
    joinable.until(worker, None)


def test_a_joined_draft_of_another_tokenizer_is_refused(joinable: Joinable, tiny_pair: Pair) -> None:
    with own_worker("draft", tiny_pair.draft, join=(joinable.port,)) as worker:
        joinable.until(worker, WorkerState.REFUSED)
        (status,) = [w for w in joinable.own.client.status().workers if w.address == worker]
        assert "vocabulary_size is 257 for draft" in status.reason
    joinable.until(worker, None)
