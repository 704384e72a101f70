"""Rounds of each kind on the pretended device: answers of the CPU's, recorded passes, and no more cost."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from harness.tiers import mostly_full

from target_worker.verify import verify_items
from tests.cuda import pretended, rounds
from tests.cuda.device import PretendedCuda
from tests.cuda.rounds import (
    JUDGINGS,
    KINDS,
    Kind,
    Round,
    Row,
    judged,
    judged_items,
    judged_logits,
    judging_name,
    play,
    script_of,
)
from tests.cuda.workers import models_on
from tests.unit.engine.runners import captured_of

MOST: dict[str, tuple[int, int]] = {
    "plain": (2, 516),
    "plain, greedy": (1, 19),
    "verification, coupled": (2, 516),
    "verification, greedy": (1, 19),
    "verification, rejection": (8, 1057),
    "verification, block": (8, 1118),
    "verification, penalties": (7, 540),
    "verification, structured": (5, 523),
    "verification, preemption": (4, 566),
    "draft, recorded chain": (1, 2),
    "draft, after a full acceptance": (4, 512),
    "draft, rejection": (28, 168),
    "draft, penalties": (32, 2136),
    "draft, structured": (24, 2068),
    "draft, lookahead branches": (3, 6),
    "draft, lookahead branches, ahead": (5, 10),
    "judging 16 x 5 rows, coupled": (2, 513),
    "judging 16 x 5 rows, greedy": (1, 16),
    "judging 16 x 5 rows, rejection": (8, 1054),
    "judging 16 x 5 rows, block": (8, 1115),
}
"""Waits and launches that each kind takes today: upper bounds. What it is to take stands with the kinds."""


def check_cost(row: Row) -> None:
    waits, launches = MOST[row.kind]
    assert row.waits <= waits, row.where
    assert row.launches <= launches


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("device", mostly_full(["cuda:1", "cuda:0"], count=1))
def test_a_round_answers_alike_and_costs_no_more(cuda: PretendedCuda, kind: Kind, device: str) -> None:
    """The second device is not the current one: what names none would be on the first."""
    played, rows = play(kind, cuda, torch.device(device))
    for i, (mine, right) in enumerate(zip(played, script_of(kind), strict=True)):
        assert mine.answers == right.answers, f"round {i}"
        assert alike_ahead(mine, right), f"round {i}"
    for row in rows:
        check_cost(row)
    models = models_on(torch.device(device))
    assert captured_of(models.target).usable
    assert captured_of(models.draft).usable


def alike_ahead(mine: Round, right: Round) -> bool:
    """What both foresee has the same drafts. One may foresee more: margins differ in their last bits."""
    for name, told in right.ahead.items():
        own, other = dict(mine.ahead.get(name, ())), dict(told)
        common = own.keys() & other.keys()
        if 2 * len(common) < len(other) or any(own[o] != other[o] for o in common):
            return False
    return True


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
    check_cost(row)


def test_every_kind_has_bounds() -> None:
    ahead = {f"{kind.name}, ahead" for kind in KINDS if kind.branches}
    assert MOST.keys() == {kind.name for kind in KINDS} | ahead | {judging_name(name) for name in JUDGINGS}


def test_the_command_writes_rows_with_their_aims(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretended", "--json", "--device", "cuda:1"])
    monkeypatch.setattr(rounds, "KINDS", [kind for kind in KINDS if kind.name == "plain, greedy"])
    monkeypatch.setattr(rounds, "JUDGINGS", {"greedy": JUDGINGS["greedy"]})
    pretended.main()
    told = json.loads(capsys.readouterr().out)
    plain, judging = told["rows"]
    assert plain["aim"] == {"waits": 1}
    assert plain["waits"] == sum(plain["where"].values()) == 1
    assert judging["kind"] == judging_name("greedy")
    assert judging["aim"] == {"waits": 1, "launches": 40}
    assert told["recordings"]["target"] > 0
