"""Streams that go on, one after another, while something happens to their servers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.waiting import HANG
from paceline.client import Client


@dataclass(frozen=True)
class Case:
    """One request, and the tokens that plain serving gives it."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    expected: Sequence[int]


@dataclass
class Continuous:
    """One thread a stream. Each takes the next case as soon as its last one is complete."""

    clients: Sequence[Client]
    cases: Sequence[Case]
    at_once: int
    completed: int = 0
    resumed: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(self.at_once)
        ]

    def _run(self, number: int) -> None:
        client, turn = self.clients[number % len(self.clients)], number
        while not self._ending.is_set():
            case = self.cases[turn % len(self.cases)]
            turn += 1
            try:
                resumed = self._one(client, case)
            except Exception as error:  # the test reports it
                with self._changed:
                    self.failures.append(repr(error))
                    self._changed.notify_all()
                return
            with self._changed:
                self.completed += 1
                self.resumed += resumed
                self._changed.notify_all()

    @staticmethod
    def _one(client: Client, case: Case) -> int:
        """Read one stream; how often it was resumed. Raises AssertionError for any other token or order."""
        tokens: list[int] = []
        with client.stream(case.prompt, dict(case.sampling), timeout=HANG) as stream:
            for chunk in stream:
                assert chunk.index == len(tokens), f"index {chunk.index} came, {len(tokens)} was due"
                tokens += chunk.token_ids
        assert tokens == list(case.expected), f"other tokens: {tokens}, not {case.expected}"
        return stream.num_resumes

    def __enter__(self) -> Continuous:
        for thread in self._threads:
            thread.start()
        return self

    def wait_for_more(self, count: int) -> None:
        """Until so many more streams are complete, of those that begin now and those that run."""
        with self._changed:
            due = self.completed + count
            done = self._changed.wait_for(lambda: self.failures or self.completed >= due, HANG)
        assert not self.failures, self.failures
        assert done, f"{self.completed} streams of {due} are complete"

    def __exit__(self, kind: object, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(HANG)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
            assert not self.failures, self.failures
