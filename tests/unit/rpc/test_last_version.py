"""The wire only grows: a process of the last version understands this one's messages, and the reverse."""

from __future__ import annotations

import pytest
from harness.last_version import NEWER, as_last_version, as_next_version, known, lines

from paceline.v1 import common_pb2, target_pb2

PLANTED = {
    "a field that is gone": "paceline.v1.WorkerInfo.colour = 3: string",
    "another number": "paceline.v1.WorkerInfo.model = 33: string",
    "another type": "paceline.v1.WorkerInfo.process_id = 4: sint64",
    "a list": "paceline.v1.WorkerInfo.model = 3: repeated string",
    "another enum value": "paceline.v1.FinishReason.FINISH_REASON_STOP = 7",
    "a method that is gone": "paceline.v1.GenerationService.Sing: paceline.v1.Text -> paceline.v1.Song",
}


def changed(before: frozenset[str]) -> set[str]:
    return before - {*lines()}


def test_nothing_of_the_last_version_changes_or_goes() -> None:
    assert changed(known()) == set()


@pytest.mark.planted
@pytest.mark.parametrize("line", PLANTED.values(), ids=PLANTED)
def test_a_changed_wire_is_noticed(line: str) -> None:
    assert changed(known() | {line}) == {line}


def test_messages_lose_what_the_last_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    last = known() - {"paceline.v1.Timings.rows = 3: uint32", "paceline.v1.Verdict.num_accepted = 4: uint32"}
    assert len(last) == len(known()) - 2
    monkeypatch.setattr("harness.last_version.known", lambda: last)
    frame = target_pb2.VerifyResponse()
    verdict = frame.events.add().verdict
    verdict.sequence_id, verdict.num_accepted = "s", 3
    verdict.timings.rows = verdict.timings.queue_us = 5
    got = as_last_version(frame).events[0].verdict
    assert (got.sequence_id, got.num_accepted, got.timings.rows, got.timings.queue_us) == ("s", 0, 0, 5)
    assert verdict.num_accepted == 3, "a copy"


def test_messages_gain_a_field_in_every_part() -> None:
    info = common_pb2.WorkerInfo(role="draft", cache=common_pb2.CacheInfo(block_size=16))
    grown = as_next_version(info)
    assert grown.SerializeToString().count(NEWER) == 2
    grown.DiscardUnknownFields()
    assert grown == info
