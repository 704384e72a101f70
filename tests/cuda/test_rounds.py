"""Rounds of each kind on the pretended device: answers of the CPU's, recorded passes, and no more cost."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from harness.tiers import mostly_full

from target_worker.verify import verify_items
from tests.cuda import pretended
from tests.cuda.device import PretendedCuda
from tests.cuda.rounds import JUDGINGS, KINDS, Kind, judged, judged_items, judged_logits, play, script_of
from tests.cuda.workers import models_on
from tests.unit.engine.runners import captured_of

MOST: dict[str, tuple[int, int]] = {}
"""Waits and launches that each kind takes today: upper bounds. What it is to take stands with the kinds."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("device", mostly_full(["cuda:1", "cuda:0"], count=1))
def test_a_round_answers_alike_and_costs_no_more(cuda: PretendedCuda, kind: Kind, device: str) -> None:
    """The second device is not the current one: what names none would be on the first."""
    played, rows = play(kind, cuda, torch.device(device))
    for i, (mine, right) in enumerate(zip(played, script_of(kind), strict=True)):
        assert mine.answers == right.answers, f"round {i}"
        assert mine.ahead == right.ahead, f"round {i}"
    for row in rows:
        assert (row.waits, row.launches) <= MOST[row.kind], row.where
        assert row.launches <= MOST[row.kind][1]
    models = models_on(torch.device(device))
    assert captured_of(models.target).usable
    assert captured_of(models.draft).usable


def test_a_preempted_sequence_waits_and_is_read_again() -> None:
    (kind,) = (kind for kind in KINDS if kind.preempts)
    answers = [asked.answers for asked in script_of(kind)]
    assert answers[0]["s2"] != ("ResourceExhaustedError",)
    assert answers[1]["s2"] == ("ResourceExhaustedError",)
    assert answers[-1]["s2"] != ("ResourceExhaustedError",)


def test_branches_are_foreseen_and_taken_over() -> None:
    (kind,) = (kind for kind in KINDS if kind.branches)
    assert all(len(asked.ahead) == 3 for asked in script_of(kind))


@pytest.mark.parametrize("name", JUDGINGS)
def test_judging_costs_no_more(cuda: PretendedCuda, name: str) -> None:
    row, outcomes = judged(name, cuda, torch.device("cuda:1"))
    sampling, mode, _ = JUDGINGS[name]
    logits = judged_logits()
    assert outcomes == verify_items(judged_items(sampling, mode), logits, logits)
    assert (row.waits, row.launches) <= MOST[row.kind], row.where
    assert row.launches <= MOST[row.kind][1]


def test_the_command_writes_rows_with_their_aims(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretended", "--json", "--device", "cuda:1"])
    pretended.main()
    told = json.loads(capsys.readouterr().out)
    rows = {row["kind"]: row for row in told["rows"]}
    assert rows.keys() == MOST.keys()
    assert all(sum(row["where"].values()) == row["waits"] for row in rows.values())
    assert rows["judging 16 x 5 rows, block"]["aim"] == {"waits": 1, "launches": 150}
    assert told["recordings"]["draft"] > 0
