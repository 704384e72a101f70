"""Chains that give their core up to whoever wants it."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from paceline.core import giving_way
from paceline.engine.chains import ChainInput, Stop
from tests.unit.engine.test_compiled import compiled

needs_policies = pytest.mark.skipif(
    not giving_way.possible(), reason="threads may not change their policy here"
)


@needs_policies
@pytest.mark.parametrize("before", ["nothing", "stop"])
def test_a_chain_gives_way_until_it_ends_or_is_stopped(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread's policy is afterwards, and in between: as long as the chain runs, another thread asks.

    A chain that finds itself stopped as it begins hurries from there on.
    """
    runner, stop = compiled("llama, two"), Stop(gives_way=True)
    found: dict[str, set[int]] = {"during": set(), "after": set()}
    begun, over = threading.Event(), threading.Event()
    names: list[int] = []
    monkeypatch.setattr(giving_way, "hurry", lambda thread: None)  # who stops it is not in time

    def draw() -> None:
        names.append(threading.get_native_id())
        stop.forget()
        begun.set()
        for _ in range(60):
            if before == "stop":
                stop.want()
            with runner.new_table() as table:
                runner.forward_chains([ChainInput(table, [3], 120)], stop)
            found["after"].add(os.sched_getscheduler(0))
        over.set()

    thread = threading.Thread(target=draw)
    thread.start()
    assert begun.wait(60)
    while not over.is_set():
        with contextlib.suppress(ProcessLookupError):
            found["during"].add(os.sched_getscheduler(names[0]))
    thread.join()
    assert found["after"] == {os.SCHED_OTHER}
    if before == "nothing":
        assert os.SCHED_IDLE in found["during"]


@needs_policies
def test_who_stops_a_chain_has_its_thread_hurry() -> None:
    stop, asked, stopped = Stop(gives_way=True), threading.Event(), threading.Event()
    policies: list[int] = []

    def give_way() -> None:
        stop.forget()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        asked.set()
        assert stopped.wait(60)
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=give_way)
    thread.start()
    assert asked.wait(60)
    stop.want()
    stopped.set()
    thread.join()
    assert policies == [os.SCHED_OTHER]
    stop.want()  # whose thread has ended: nothing happens
    assert stop.wanted


def test_chains_that_keep_their_core_change_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[int] = []
    monkeypatch.setattr(giving_way, "hurry", changed.append)
    runner, stop = compiled("llama, two"), Stop()
    stop.forget()
    runner.forward_chains([ChainInput(runner.new_table(), [3], 6)], stop)
    stop.want()
    assert not changed
