"""The rate of a fleet in closed form, against a queueing simulation; workers that answer at once."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core.messages import DraftRound, OpenSequence, VerifyRound
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.decoding import theory
from paceline.telemetry.worker import WorkerObserver
from tools.coordinator_rounds.instant import InstantDraft, InstantTarget, text
from tools.fleet import Fleet

ROOT = Path(__file__).parents[3]
ONE = Fleet(
    targets=1, drafts=1, coordinators=1, target_rows=500.0, draft_tokens=800.0, coordinator_rounds=300.0
)


def seconds_of(fleet: Fleet, k: int) -> dict[str, float]:
    """Of one round at one process of each kind."""
    parts = {"coordinators": 1 / fleet.coordinator_rounds, "targets": (k + 1) / fleet.target_rows}
    return parts | ({"drafts": k / fleet.draft_tokens} if k else {})


def simulated(fleet: Fleet, k: int, sequences: int, rounds: int = 5000) -> float:
    """Rounds a second of sequences in a closed loop; each process serves one at a time, for random times."""
    rng, order = random.Random(k), itertools.count()
    kinds = list(seconds_of(fleet, k).items())
    free = {kind: [0.0] * getattr(fleet, kind) for kind, _ in kinds}
    arrivals = [(0.0, next(order), 0) for _ in range(sequences)]
    done, now = 0, 0.0
    while done < rounds:
        now, _, at = heapq.heappop(arrivals)
        kind, mean = kinds[at]
        ends = max(now, free[kind][0]) + rng.expovariate(1 / mean)
        heapq.heapreplace(free[kind], ends)
        done += at == 0
        heapq.heappush(arrivals, (ends, next(order), (at + 1) % len(kinds)))
    return done / now


@pytest.mark.parametrize(
    ("changes", "k", "limit"),
    [
        ({}, 0, "coordinators"),
        ({}, 4, "targets"),
        ({"targets": 4}, 4, "drafts"),
        ({"targets": 4, "drafts": 3}, 4, "coordinators"),
        ({"targets": 5, "drafts": 3, "coordinators": 2}, 4, "targets"),
    ],
)
def test_a_busy_fleet_reaches_its_bound(changes: dict[str, int], k: int, limit: str) -> None:
    fleet = replace(ONE, **changes)
    rate = fleet.rate(0.8, k)
    assert rate.limit == limit
    assert rate.tokens == pytest.approx(rate.rounds * theory.expected_tokens(0.8, k))
    assert simulated(fleet, k, sequences=100) == pytest.approx(rate.rounds, rel=0.08)


@pytest.mark.parametrize("sequences", [1, 2, 8, 100])
def test_no_number_of_sequences_exceeds_the_rate(sequences: int) -> None:
    fleet = replace(ONE, targets=4)
    whole = sum(seconds_of(fleet, 4).values())
    rate = fleet.rate(0.8, 4, sequences, whole)
    assert simulated(fleet, 4, sequences) <= rate.rounds * 1.05
    assert rate.limit == ("sequences" if sequences < 8 else "drafts")
    if sequences == 1:
        assert simulated(fleet, 4, 1) == pytest.approx(1 / whole, rel=0.05)


def test_the_pages_example_is_what_the_formula_gives() -> None:
    page = (ROOT / "docs/fleet.md").read_text()
    given = re.search(r"--target-rows (\d+) --draft-tokens (\d+) --coordinator-rounds (\d+)", page)
    assert given is not None
    rows, tokens, rounds = map(float, given.groups())
    example = Fleet(
        targets=4, drafts=1, coordinators=1, target_rows=rows, draft_tokens=tokens, coordinator_rounds=rounds
    )
    told = re.findall(r"^\| (\d) \| (\d) \| (\d) \| ([\d,]+) \| ([a-z ]+) \|$", page, re.MULTILINE)
    assert len(told) == 5
    for drafts, coordinators, k, best, limits in told:
        fleet = replace(example, drafts=int(drafts), coordinators=int(coordinators))
        rates = {each: fleet.rate(0.8, each).tokens for each in (0, 2, 4, 8)}
        assert (max(rates, key=lambda each: rates[each]), round(rates[int(k)])) == (
            int(k),
            int(best.replace(",", "")),
        )
        bounds = fleet.rounds(int(k))
        assert {kind for kind in bounds if bounds[kind] == min(bounds.values())} == set(limits.split(" and "))


def test_a_fleet_without_drafts_decodes_plainly() -> None:
    fleet = replace(ONE, drafts=0, draft_tokens=0.0)
    assert fleet.rate(0.8, 4).tokens == 0
    assert fleet.rate(0.8, 0).tokens == 300
    assert fleet.rounds(0)["drafts"] == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [("targets", 0), ("coordinators", 0), ("target_rows", math.inf), ("draft_tokens", -1.0), ("drafts", -1)],
)
def test_an_impossible_fleet_is_refused(field: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    with refused(field):
        replace(ONE, **changes)


def test_instant_workers_tell_one_text() -> None:
    built: Any = None
    draft, target = (kind(built, built, WorkerObserver()) for kind in (InstantDraft, InstantTarget))
    params = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 4)
    for worker in (draft, target):
        assert worker.handle(OpenSequence("s", 1, text(0, 4), params), 0.0) == []
        assert worker.holds("s")
    (proposed,) = draft.handle(DraftRound("s", 1, 1, 4, (), 3), 0.0)
    (judged,) = target.handle(VerifyRound("s", 1, 1, 4, (), proposed.proposal), 0.0)
    assert proposed.proposal == Proposal(text(4, 3))
    assert judged.verdict.num_accepted == 3
    assert judged.verdict.token_ids == text(4, 4)
    assert judged.verdict.num_computed_tokens == 4 + 4 - 1
    draft.drop("s")
    assert not draft.holds("s")


@pytest.mark.full
def test_rounds_of_a_coordinator_are_counted() -> None:
    """Beside real processes: with K draft tokens a round commits K + 1 tokens."""
    words = ["--sequences", "2", "--k", "0", "3", "--seconds", "0.3", "--repeats", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.coordinator_rounds", *words], cwd=ROOT, capture_output=True, check=True
    )
    plain, speculative = json.loads(done.stdout)
    for found, k in ((plain, 0), (speculative, 3)):
        assert (found["k"], found["sequences"]) == (k, 2)
        assert found["rounds"] > 0
        # The first round of a request has no proposal, and its last one may be cut.
        assert found["rounds"] * k < found["tokens"] <= found["rounds"] * (k + 1)
        assert found["carried"] == found["rounds"] / found["processor_seconds"]
