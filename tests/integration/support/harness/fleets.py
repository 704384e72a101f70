"""A fleet of real processes that are killed, drained and replaced: none is restarted by itself."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.log import Log
from harness.pair import Pair
from harness.reading import Reading
from harness.restarting import Asked, outcome
from harness.stacks import NEVER, OwnCoordinator, own_coordinator, process
from harness.waiting import HANG, until
from paceline.client import Client, WorkerState, WorkerStatus
from paceline.core.config import DraftConfig, TargetConfig
from paceline.supervisor import Supervisor

CONFIGS = {"target": TargetConfig, "draft": DraftConfig}


@dataclass(frozen=True, eq=False)
class FleetWorker:
    """One worker; another one takes its place when it is gone."""

    role: str
    joins: bool
    """It joins the coordinators by itself. Others are found behind a host name."""
    address: str
    supervisor: Supervisor

    def end(self, number: signal.Signals) -> None:
        """Signal it, and wait for its end."""
        self.supervisor.signal(self.role, number)
        self.supervisor.wait_until(self.role, lambda status: status.pid is None, HANG)


class WorkerFleet:
    """Coordinators, and the workers that they share."""

    def __init__(self, pair: Pair, hosts: Path, opened: contextlib.ExitStack) -> None:
        """`hosts` is the file of the toy `host_names`. `opened` ends every process."""
        self.log = Log()
        self.coordinators: list[OwnCoordinator] = []
        self.workers: list[FleetWorker] = []
        self._pair = pair
        self._hosts = hosts
        self._opened = opened
        self._numbers = itertools.count(2)
        self._ports: dict[str, int] = {}
        """Of each role's host name: its workers have one port, and addresses of their own."""
        self._write_hosts()

    def add_coordinators(self, count: int) -> None:
        """Which find the workers that are there, and those that come, by name and by their joining."""
        names = {role: [f"dns:{role}.test:{port}"] for role, port in self._ports.items()}
        self.coordinators += [
            self._opened.enter_context(
                own_coordinator(
                    self._pair,
                    names.get("target", ()),
                    names.get("draft", ()),
                    backoff=NEVER,
                    join_port=0,
                    draft_timeout=2.0,
                    recovery_timeout=HANG,
                )
            )
            for _ in range(count)
        ]

    def add_worker(self, role: str, *, joins: bool) -> FleetWorker:
        """Start one, and wait until it serves each coordinator."""
        values = {
            "model": str(getattr(self._pair, role)),
            "threads": 1,
            "num_blocks": 512,
            "device": "cpu",
            "exit_with_parent": True,
        }
        if joins:
            values["join"] = tuple(_join_address(each) for each in self.coordinators)
        else:
            values |= {"host": f"127.0.0.{next(self._numbers)}", "port": self._ports.get(role, 0)}
        supervisor = self._opened.enter_context(Supervisor(sink=self.log, backoff=NEVER))
        config = CONFIGS[role](**values)
        (status,) = supervisor.start([process(role, f"{role}-worker", config)], 300.0)
        worker = FleetWorker(role, joins, status.address, supervisor)
        self.workers.append(worker)
        if not joins:
            self._ports.setdefault(role, int(status.address.rpartition(":")[2]))
            self._write_hosts()
        until(lambda: all(self._is_ready(each, worker) for each in self.coordinators), f"{worker}")
        return worker

    def replace(self, worker: FleetWorker, number: signal.Signals) -> FleetWorker:
        """End a worker in the middle of its sequences. Returns the one that takes its place."""
        until(lambda: self._sequences(worker) > 0, "sequences of the worker")
        worker.end(number)
        self.workers.remove(worker)
        self._write_hosts()
        return self.add_worker(worker.role, joins=worker.joins)

    def kill_coordinator(self) -> None:
        """SIGKILL the first one in the middle of its requests."""
        lost = self.coordinators[0]
        until(lambda: lost.client.status().coordinator.running > 0, "its requests")
        lost.supervisor.signal("coordinator", signal.SIGKILL)
        self.coordinators.remove(lost)

    def check_pools_whole(self) -> None:
        """Once nothing runs, no worker holds a block or a sequence."""

        def whole() -> bool:
            caches = [
                w.info.cache for w in self.coordinators[0].client.status().workers if w.info is not None
            ]
            return all((c.free_blocks, c.sequences) == (c.total_blocks, 0) for c in caches)

        until(whole, "whole pools", timeout=30.0)

    def _is_ready(self, coordinator: OwnCoordinator, worker: FleetWorker) -> bool:
        status = self._status(coordinator, worker)
        return status is not None and status.state is WorkerState.READY

    def _sequences(self, worker: FleetWorker) -> int:
        status = self._status(self.coordinators[0], worker)
        return 0 if status is None or status.info is None else status.info.cache.sequences

    def _status(self, coordinator: OwnCoordinator, worker: FleetWorker) -> WorkerStatus | None:
        listed = coordinator.client.status().workers
        return next((each for each in listed if each.address == worker.address), None)

    def _write_hosts(self) -> None:
        named = [worker for worker in self.workers if not worker.joins]
        lines = [f"{worker.address.partition(':')[0]} {worker.role}.test" for worker in named]
        new = self._hosts.with_suffix(".new")
        new.write_text("\n".join(lines))
        new.rename(self._hosts)


def _join_address(coordinator: OwnCoordinator) -> str:
    (line,) = coordinator.log.find("workers may join on")
    found = re.search(r"127\.0\.0\.1:\d+", line)
    assert found is not None
    return found.group()


class SteadyLoad:
    """A number of streams at any time: each that ends is compared, and another one begins."""

    def __init__(self, client: Client, asked: Sequence[Asked], streams: int) -> None:
        self.counts: Counter[str] = Counter()
        """Of `sound`, `lost`, `doubled` and `different` streams, and how many were `resumed`."""
        self._client = client
        self._requests: Iterator[Asked] = itertools.cycle(asked)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(streams)]

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                asked = next(self._requests)
            reading = Reading(self._client, asked.prompt, asked.sampling)
            found = outcome(reading, asked)
            with self._lock:
                self.counts[found] += 1
                self.counts["resumed"] += reading.num_resumes > 0

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(HANG)
        assert not any(thread.is_alive() for thread in self._threads), "a stream does not end"
