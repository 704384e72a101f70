"""Whether threads may give way, and come back from it."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from paceline.core import giving_way


def asked_anew() -> bool:
    return giving_way.possible.__wrapped__()


def test_nothing_of_the_process_changes_by_asking() -> None:
    if not hasattr(os, "sched_getscheduler"):
        pytest.skip("a system without policies")
    before, threads = os.sched_getscheduler(0), threading.active_count()
    answers = {asked_anew(), asked_anew()}
    assert len(answers) == 1
    assert os.sched_getscheduler(0) == before
    assert threading.active_count() == threads


@pytest.mark.skipif(not giving_way.AVAILABLE, reason="a system without policies")
@pytest.mark.parametrize("refused", [0, 1])
def test_it_is_not_possible_where_the_way_there_or_back_is_refused(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def change(thread: int, policy: int, param: Any) -> None:
        calls.append(policy)
        if len(calls) > refused:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", change)
    assert not asked_anew()
    assert calls == [os.SCHED_IDLE, os.SCHED_OTHER][: refused + 1]


@pytest.mark.skipif(not giving_way.AVAILABLE, reason="a system without policies")
def test_a_policy_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_BATCH)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: pytest.fail("it was changed"))
    assert not asked_anew()


def test_it_is_not_possible_without_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving_way, "AVAILABLE", False)
    assert not asked_anew()
