"""More coordinators of one stack's workers: found by name; when one is killed its clients lose nothing."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from harness.history import validate
from harness.reading import Reading
from harness.restarting import BEGUN, Asked, outcome, undisturbed
from harness.resumed import history_of
from harness.stacks import NEVER, OwnCoordinator, RunningStack, own_coordinator
from harness.waiting import HANG, until

from paceline.client import Client, WorkerState

COUNT = 16
RATIOS = ("rejection", "block")


@contextlib.contextmanager
def both(stack: RunningStack) -> Iterator[list[OwnCoordinator]]:
    """Two coordinators of the shared stack's workers; one that is killed stays so."""
    targets, drafts = ([stack.stack.address_of(role)] for role in ("target", "draft"))
    with contextlib.ExitStack() as own:
        yield [
            own.enter_context(own_coordinator(stack.pair, targets, drafts, backoff=NEVER)) for _ in range(2)
        ]


def ready(one: OwnCoordinator) -> bool:
    workers = one.client.status().workers
    return [worker.state for worker in workers] == [WorkerState.READY] * 2


def begin(client: Client, asked: list[Asked]) -> list[Reading]:
    """All of them, and one in each ratio mode, with their first tokens."""
    readings = [Reading(client, each.prompt, each.sampling) for each in asked]
    readings += [Reading(client, asked[1].prompt, asked[1].sampling, acceptance=mode) for mode in RATIOS]
    for reading in readings:
        reading.wait_for_tokens(BEGUN)
    return readings


@pytest.mark.timeout(300)
def test_streams_survive_a_killed_coordinator(stack: RunningStack) -> None:
    asked = [*undisturbed(stack.client, COUNT)]
    with both(stack) as coordinators, Client([one.address for one in coordinators]) as client:
        for one in coordinators:
            until(lambda one=one: ready(one), "both workers of a coordinator")
        while True:
            readings = begin(client, asked)
            # The target stands still meanwhile, so that no stream ends before the coordinator does.
            with stack.standing_target():
                if not any(reading.over for reading in readings):
                    lost, other = coordinators
                    lost.supervisor.signal("coordinator", signal.SIGKILL)
                    break
            for reading in readings:
                reading.result()
        late = [Reading(client, each.prompt, each.sampling) for each in asked[:4]]
        pairs = zip([*readings[:COUNT], *late], [*asked, *asked[:4]], strict=True)
        counts = Counter(outcome(reading, each) for reading, each in pairs)
        assert counts == Counter(sound=COUNT + 4)
        for reading in readings[COUNT:]:
            assert len(reading.result().token_ids) == asked[1].sampling["max_tokens"]
            validate(history_of(reading.chunks))
        resumed = [number for number, reading in enumerate(readings) if reading.num_resumes]
        assert resumed
        assert len({number % 2 for number in resumed}) == 1, "they began in turn, and one half lost nothing"
        assert other.client.status().coordinator.failed_requests == 0
        until(lambda: other.client.status().coordinator.running == 0, "the end of all streams")
    stack.check_pools_whole()


def test_workers_behind_a_host_name_serve(stack: RunningStack) -> None:
    addresses = [stack.stack.address_of(role) for role in ("target", "draft")]
    target, draft = (f"dns:localhost:{address.rpartition(':')[2]}" for address in addresses)
    speculation = {"num_speculative_tokens": 3, "drafter": "draft"}
    with own_coordinator(stack.pair, [target], [draft]) as own:
        until(lambda: ready(own), "both workers")
        assert [worker.address for worker in own.client.status().workers] == addresses
        for each in undisturbed(own.client, 3, num_speculative_tokens=0):
            result = own.client.generate(each.prompt, each.sampling, speculation=speculation, timeout=HANG)
            assert result.token_ids == each.whole.token_ids
            assert result.speculative_decoding.num_draft_tokens > 0
