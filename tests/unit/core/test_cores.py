"""Threads on cores of their own."""

from __future__ import annotations

import os
import threading

import pytest

from paceline.core import cores
from paceline.core.cores import CAN_BIND, bind_thread, check_cores
from paceline.core.errors import InvalidArgumentError

needs_binding = pytest.mark.skipif(not CAN_BIND, reason="the system does not let threads be bound")


@needs_binding
def test_a_core_that_is_not_there_is_refused() -> None:
    usable = sorted(os.sched_getaffinity(0))
    check_cores(())
    check_cores(usable)
    missing = usable[-1] + 1
    with pytest.raises(InvalidArgumentError, match=f"include {missing}; this process may use") as refused:
        check_cores((*usable, missing))
    assert refused.value.field == "cores"
    with pytest.raises(InvalidArgumentError) as refused:
        check_cores((missing,), "message_cores")
    assert refused.value.field == "message_cores"


def test_a_system_without_binding_refuses_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CAN_BIND", False)
    check_cores(())
    with pytest.raises(InvalidArgumentError, match="on this system"):
        check_cores((0,))


@needs_binding
def test_only_the_calling_thread_is_bound_and_what_it_starts() -> None:
    before = os.sched_getaffinity(0)
    one = max(before)
    found: list[set[int]] = []

    def started() -> None:
        found.append(os.sched_getaffinity(0))

    def bound() -> None:
        bind_thread(())
        started()
        bind_thread((one,))
        started()
        child = threading.Thread(target=started)
        child.start()
        child.join()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found == [before, {one}, {one}]
    assert os.sched_getaffinity(0) == before
