"""Structures that take much to compile are accepted or refused within bounds; no other request waits long."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator
from harness.tiers import mostly_full
from harness.waiting import HANG, until
from harness.wire import Line, next_round, params

from paceline.client import Client
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.messages import OpenSequence, SequenceFailed
from paceline.core.security.keyfile import write_keys
from paceline.core.security.keys import ApiKey, KeyRing, digest
from tests.fault.bombs.structures import BOMBS, bomb
from tests.fault.streams import memory

PROMPT = [5, 6, 7]
SECONDS_EACH = 2 * limits.MAX_STRUCTURE_SECONDS
"""Of a coordinator, what it asked to compile included: the limit, and as much for all else."""
TICKS = os.sysconf("SC_CLK_TCK")
SLOW = "more intersected lengths"
"""Minutes, and gigabytes."""
KEYS = {"mallory": "pk_mallory_0123456789abcdef", "bob": "pk_bob_0123456789abcdef0123"}


def slow(number: int) -> dict[str, Any]:
    """Another one each time, so that no verdict is remembered."""
    structure = {"grammar": f"{BOMBS[SLOW]['grammar']}\nB{number}: /b/"}
    return {"max_tokens": 3, "structured_outputs": structure}


def fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """The processes below this one."""
    parents = {int(p.name): fields(int(p.name)) for p in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for above in found:
        found += [child for child, of in parents.items() if of and int(of[1]) == above and of[0] != "Z"]
    return found[1:]


def seconds_of(pid: int) -> float:
    """Processor time of a process and of all below it, the ended ones included."""
    return sum(sum(map(int, fields(each)[11:15])) for each in (pid, *descendants(pid))) / TICKS


def field_refused(client: Client, sampling: dict[str, Any]) -> str | None:
    """What an InvalidArgumentError names; None if the request is served."""
    try:
        client.generate(PROMPT, sampling, timeout=HANG)
    except InvalidArgumentError as error:
        return error.field
    return None


@pytest.mark.parametrize(
    "name", mostly_full(sorted(BOMBS, key=lambda name: "more" in name), count=len(BOMBS) - 2)
)
def test_a_structure_bomb_stays_within_its_limits(faulty: RunningStack, name: str) -> None:
    roles = ("coordinator", "target", "draft")
    pids = [faulty.stack.pid(role) for role in roles]
    faulty.client.generate(PROMPT, {"max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}, timeout=HANG)
    before = [(seconds_of(pid), memory(pid, "VmHWM")) for pid in pids]
    sampling = {"max_tokens": 2, "seed": 1, "structured_outputs": bomb(name)}
    with faulty.client.stream(PROMPT, {"max_tokens": 400, "ignore_eos": True, "seed": 2}) as other:
        next(iter(other))
        refused = field_refused(faulty.client, sampling)
        assert refused in (None, bomb(name).field)
    used, _ = before[0]
    assert seconds_of(pids[0]) - used < SECONDS_EACH + 1.0, "with what a stream of 400 tokens takes"
    for pid, (_, most) in zip(pids, before, strict=True):
        assert memory(pid, "VmHWM") - most < limits.MAX_STRUCTURE_BYTES
    assert [faulty.stack.pid(role) for role in roles] == pids
    faulty.good_request()


@pytest.fixture
def guarded(faulty: RunningStack, tmp_path: Path) -> Iterator[OwnCoordinator]:
    """A coordinator with two tenants."""
    file = tmp_path / "keys.json"
    write_keys(file, KeyRing(ApiKey(name=name, sha256=digest(token)) for name, token in KEYS.items()))
    target = faulty.stack.address_of("target")
    with own_coordinator(faulty.pair, [target], api_keys=str(file), drain_timeout=1.0) as own:
        yield own


def test_a_tenants_structure_waits_for_at_most_one_other(guarded: OwnCoordinator) -> None:
    """Slow structures of another tenant are abandoned when their client leaves."""
    with (
        Client(guarded.address, api_key=KEYS["mallory"]) as mallory,
        Client(guarded.address, api_key=KEYS["bob"]) as bob,
        ThreadPoolExecutor(16) as threads,
    ):
        bob.generate(PROMPT, {"max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}, timeout=HANG)
        asked = [threads.submit(mallory.generate, PROMPT, slow(n), timeout=HANG) for n in range(16)]
        coordinator = guarded.supervisor.status("coordinator").pid
        until(lambda: len(descendants(coordinator)) > 1, "the first being compiled")
        answered = sum(each.done() for each in asked)
        bob.generate(PROMPT, {"max_tokens": 2, "structured_outputs": {"regex": "[bc]+"}}, timeout=HANG)
        assert sum(each.done() for each in asked) - answered <= 3
        before = seconds_of(coordinator)
        mallory.close()
        for each in asked:
            assert isinstance(each.exception(HANG), PacelineError | ValueError)
        until(lambda: len(descendants(coordinator)) == 1, "nothing being compiled")
        assert seconds_of(coordinator) - before < 4 * limits.MAX_STRUCTURE_SECONDS


def test_a_compiling_coordinator_can_be_stopped(guarded: OwnCoordinator) -> None:
    pid = guarded.supervisor.status("coordinator").pid
    with (
        # Asks its successor for nothing.
        Client(guarded.address, api_key=KEYS["mallory"], resume_seconds=0) as mallory,
        ThreadPoolExecutor(40) as threads,
    ):
        asked = [threads.submit(mallory.generate, PROMPT, slow(n), timeout=HANG) for n in range(40)]
        until(lambda: len(descendants(pid)) > 1, "the first being compiled")
        below = descendants(pid)
        ending = os.pidfd_open(pid)
        try:
            guarded.supervisor.signal("coordinator", signal.SIGTERM)
            ended, _, _ = select.select([ending], [], [], HANG)
            assert ended
        finally:
            os.close(ending)
        until(lambda: not any(fields(each)[:1] not in ([], ["Z"]) for each in below), "its processes' end")
        for each in asked:
            assert isinstance(each.exception(HANG), PacelineError)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_refuses_a_structure_bomb_and_goes_on(faulty: RunningStack, role: str) -> None:
    """Sent directly, without a coordinator that checks first."""
    structured = params(len(PROMPT), structured_outputs=bomb(SLOW))
    with Line(faulty.stack.address_of(role), role) as line:
        other = line.open(PROMPT)
        line.send(OpenSequence("bomb", 1, tuple(PROMPT), structured))
        rounds = 0
        while True:
            event = line.ask(next_round(other))
            if isinstance(event, SequenceFailed):
                break
            rounds += 1
        assert event.sequence_id == "bomb"
        assert event.error.field == "structured_outputs.grammar"
        assert rounds > 0
