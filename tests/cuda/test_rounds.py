"""Rounds of each kind on the pretended device: answers of the CPU's, recorded passes, and no more cost."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.tiers import mostly_full

from paceline.core.types import AcceptanceMode
from paceline.decoding import coupled
from paceline.decoding.cuda.kernels import agree
from target_worker.acceptance import ratios
from target_worker.verify import verify_items
from tests.cuda import gumbel_kernels, pretended, rounds
from tests.cuda.device import CPU, PretendedCuda
from tests.cuda.rounds import (
    JUDGINGS,
    KINDS,
    PROMPT,
    VOCAB,
    K,
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
    "plain": (1, 10),
    "plain, greedy": (1, 9),
    "verification, coupled": (1, 10),
    "verification, greedy": (1, 9),
    "verification, rejection": (1, 70),
    "verification, block": (1, 131),
    "verification, penalties": (1, 37),
    "verification, trees, coupled": (1, 12),
    "verification, trees, rejection": (1, 85),
    "verification, trees, structured": (1, 21),
    "verification, structured": (1, 19),
    "verification, preemption": (1, 60),
    "draft, recorded chain": (1, 2),
    "draft, after a full acceptance": (1, 2),
    "draft, rejection": (1, 2),
    "draft, penalties": (4, 140),
    "draft, structured": (4, 76),
    "draft, lookahead branches": (0, 6),
    "draft, lookahead branches, ahead": (5, 10),
    "judging 16 x 5 rows, coupled": (1, 7),
    "judging 16 x 5 rows, greedy": (1, 6),
    "judging 16 x 5 rows, rejection": (1, 67),
    "judging 16 x 5 rows, block": (1, 128),
}
"""Waits and launches that each kind takes today: upper bounds. What it is to take stands with the kinds.

Coupled noise is made as by kernels.
"""


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


EVERY_PARAMETER: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"logit_bias": {3: 2.0}},
    {"min_tokens": 50, "stop_token_ids": (4, 5)},
    {"allowed_token_ids": (1, 2, 3, 4, 5, 6, 7)},
    {"repetition_penalty": 1.3, "presence_penalty": 0.2},
]


def test_requests_of_all_kinds_are_judged_in_one_wait(cuda: PretendedCuda) -> None:
    """Each parameter in each mode, and at temperature 0; the rows of all modes in one batch."""
    items = [
        replace(
            judged_items({"temperature": 0.8}, mode)[0],
            params=Kind("", {"temperature": temperature} | asked, mode).params_of(0),
            ledger=[token % VOCAB for token in range(PROMPT)],
        )
        for asked in EVERY_PARAMETER
        for mode in AcceptanceMode
        for temperature in (0.0, 0.8)
    ]
    words = replace(items[0].params, bad_words_token_ids=((1, 2), (3,)))
    items.append(replace(items[0], params=words))
    logits = torch.randn(len(items) * (K + 1), VOCAB, generator=torch.Generator().manual_seed(4))
    there = logits.to("cuda:1")
    with cuda.counting() as counts:
        outcomes = verify_items(items, there, there)
    assert outcomes == verify_items(items, logits, logits)
    assert counts.num_waits == 1


def test_torch_noise_judges_alike_in_one_wait(cuda_without_kernels: PretendedCuda) -> None:
    row, outcomes = judged("coupled", cuda_without_kernels, torch.device("cuda:1"))
    logits = judged_logits()
    assert outcomes == verify_items(judged_items(*JUDGINGS["coupled"][:2]), logits, logits)
    assert row.waits == 1
    assert row.launches > MOST[row.kind][1]


def test_kernels_give_what_torch_operations_give() -> None:
    assert agree(gumbel_kernels, CPU)


@pytest.mark.planted
@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_a_pageable_copy_in_judging_is_seen(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No number differs: the host only waits before it launches the rest."""
    sender = coupled if name == "coupled" else ratios
    monkeypatch.setattr(sender, "to_device", lambda tensor, device: tensor.to(device, non_blocking=True))
    row, outcomes = judged(name, cuda, torch.device("cuda:1"))
    logits = judged_logits()
    assert outcomes == verify_items(judged_items(*JUDGINGS[name][:2]), logits, logits)
    with pytest.raises(AssertionError, match="copy to the device"):
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
