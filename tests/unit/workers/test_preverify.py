"""Rows that a target computes between rounds: the same verdicts, from fewer rows or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InternalError
from paceline.core.messages import CloseSequence, OpenSequence, RoundVerdict, VerifyAhead
from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from target_worker.preverify import PAUSE
from tests.sim.reference import slow_verdict
from tests.unit.workers.test_target_engine import GREEDY, MODEL, PROMPT, VOCAB, Worker, failure, right

N = len(PROMPT)


def waiting(
    sampling: SamplingParams = GREEDY, mode: AcceptanceMode = AcceptanceMode.COUPLED, **kinds: Any
) -> Worker:
    """A worker whose sequence had its first verdict, of one token, and waits for its draft tokens."""
    worker = Worker(**kinds)
    worker.runner.cancellable = True
    worker.open(sampling=sampling, mode=mode)
    worker.ask()
    worker.it.step()
    worker.runner.passes.clear()
    return worker


def join(worker: Worker, *names: str) -> None:
    """Other sequences that wait as well; their passes are not counted."""
    for name in names:
        worker.open(name)
        worker.ask(name=name)
    while worker.it._rounds:
        worker.it.step()
    worker.runner.passes.clear()


def ledger(worker: Worker) -> tuple[int, ...]:
    held = worker.it.sequences.find("s")
    assert held is not None
    return tuple(held.session.tokens)


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_verification_has_one_row_less(accepted: int) -> None:
    best, worker = right(5), waiting()
    assert worker.it.has_work
    assert worker.run() == []
    assert worker.length() == N + 1, "the newest token has an entry, which no verdict tells of"
    proposal = (*best[1 : 1 + accepted], *map(wrong, best[1 + accepted : 4]))
    assert worker.ask(proposal, number=2, base=N + 1) == []
    (event,) = worker.it.step()
    assert worker.runner.passes == [1, 3]
    assert event.verdict.token_ids == best[1 : 2 + accepted]
    assert worker.length() == event.verdict.num_computed_tokens == N + 1 + accepted


@pytest.mark.parametrize("proposed", [0, 1, 3])
def test_a_round_decided_by_the_row_takes_no_pass(proposed: int) -> None:
    """A first draft token that is not the target's own, or none."""
    best, worker = right(3), waiting()
    worker.run()
    (event,) = worker.ask((wrong(best[1]),) * proposed, number=2, base=N + 1)
    assert isinstance(event, RoundVerdict)
    assert (event.round, event.verdict.num_accepted, event.verdict.token_ids) == (2, 0, (best[1],))
    timings = event.verdict.timings
    assert (timings.rows, timings.sequences) == (0, proposed > 0), "of a plain round it says nothing"
    assert worker.runner.passes == [1]
    assert worker.length() == event.verdict.num_computed_tokens == N + 1
    # Asked again it says the same, and it goes on as ever.
    assert worker.ask((wrong(best[1]),) * proposed, number=2, base=N + 1) == [event]
    worker.run()
    (event,) = worker.ask((), number=3, base=N + 2) or worker.it.step()
    assert event.verdict.token_ids == (best[2],)


@pytest.mark.parametrize("mode", list(AcceptanceMode))
@pytest.mark.parametrize("seed", range(8))
def test_drawn_verdicts_equal_those_of_one_pass(mode: AcceptanceMode, seed: int) -> None:
    sampling = SamplingParams(temperature=0.9, seed=seed)
    worker, rng = waiting(sampling, mode), np.random.default_rng(seed)
    worker.run()
    chain = tuple(int(t) for t in rng.integers(0, VOCAB, 2))
    q = rng.dirichlet(np.ones(VOCAB), 2).astype("<f4")
    told = tuple(SparseDistribution(np.arange(VOCAB, dtype="<u4").tobytes(), row.tobytes()) for row in q)
    proposal = Proposal(chain, distributions=() if mode is AcceptanceMode.COUPLED else told)
    before = ledger(worker)
    expected = slow_verdict(MODEL, before, SequenceParams(sampling, mode, N), proposal)
    (event,) = worker.ask(proposal, number=2, base=N + 1) or worker.it.step()
    assert (event.verdict.num_accepted, event.verdict.token_ids[-1]) == expected
    assert ledger(worker) == (*before, *event.verdict.token_ids)
    assert worker.length() == len(ledger(worker)) - 1


def test_an_abandoned_pass_leaves_no_trace() -> None:
    best, worker = right(4), waiting()
    worker.runner.stops = lambda cancel: True
    assert worker.it.step() == []
    assert worker.it.has_work, "it waits on"
    assert worker.length() == N
    worker.ask(best[1:3], number=2, base=N + 1)
    (event,) = worker.it.step()
    assert event.verdict.token_ids == best[1:4]
    assert worker.runner.passes == [3]


def test_a_command_stops_the_precomputation() -> None:
    worker = waiting()
    seen: list[bool] = []
    worker.runner.stops = lambda cancel: bool(
        seen.append(bool(cancel.flag[0])) or worker.it.notify([]) or cancel.flag[0]
    )
    worker.it.step()
    assert seen == [False]
    assert worker.length() == N
    worker.it.step()
    assert seen == [False, True], "it is not taken up yet"
    worker.it.reset_cancel()
    worker.runner.stops = lambda cancel: bool(cancel.flag[0])
    worker.it.step()
    assert worker.length() == N + 1


def test_precomputation_begins_shortly_after_the_verdict() -> None:
    worker = waiting()
    assert worker.it.batching_delay() == pytest.approx(PAUSE)
    worker.clock.advance(PAUSE)
    assert worker.it.batching_delay() == 0


@pytest.mark.parametrize("reason", ["told not to", "cannot stop", "over", "next round known"])
def test_unsuitable_sequences_are_not_precomputed(reason: str) -> None:
    best = right(3)
    worker = Worker(eos=(best[0],) if reason == "over" else (), pre_verify=reason != "told not to")
    worker.runner.cancellable = reason != "cannot stop"
    worker.open()
    worker.ask()
    if reason == "next round known":
        worker.it.handle(VerifyAhead("s", 1, 1, N, {Outcome(0, best[0]): Proposal(best[1:2])}), 0.0)
    worker.it.step()
    assert worker.it.has_work is (reason == "next round known")
    assert worker.length() == N


@pytest.mark.parametrize("end", ["closed", "dropped", "newer epoch"])
def test_an_ended_sequence_is_not_precomputed(end: str) -> None:
    worker = waiting()
    if end == "closed":
        worker.it.handle(CloseSequence("s", 1), 0.0)
    elif end == "dropped":
        worker.it.drop("s")
    else:
        worker.it.handle(OpenSequence("s", 2, PROMPT, SequenceParams(GREEDY, AcceptanceMode.COUPLED, N)), 0.0)
    assert not worker.it.has_work


def test_a_row_without_its_entries_is_not_used() -> None:
    """An older sequence took the blocks: the ledger is computed again."""
    best, worker = right(4), waiting(num_blocks=4)
    worker.run()
    held = worker.it.sequences.find("s")
    assert held is not None
    held.cut_to(0)
    worker.ask(best[1:3], number=2, base=N + 1)
    (event,) = worker.it.step()
    assert event.verdict.token_ids == best[1:4]
    assert worker.runner.passes == [1, N + 3]


def test_a_row_of_another_ledger_is_not_used() -> None:
    """The coordinator's ledger has another token in the same place."""
    worker = waiting()
    worker.run()
    other = wrong(ledger(worker)[-1])
    worker.ask((), number=2, base=N + 1, tail=(other,))
    (event,) = worker.it.step()
    assert event.verdict.token_ids == right(1, (*PROMPT, other))


def test_a_full_cache_is_no_failure() -> None:
    """All blocks are in use, and no sequence loses any."""
    worker = Worker(num_blocks=2)
    worker.runner.cancellable = True
    for name in ("s", "t"):
        worker.open(name, (1, 2, 3, 4))
        worker.ask(name=name, base=4)
        worker.it.step()
    assert worker.run() == []
    assert worker.length() == worker.length("t") == 4


def test_a_failed_precomputation_is_left_to_the_round(caplog: pytest.LogCaptureFixture) -> None:
    best, worker = right(3), waiting()
    worker.runner.crash_on = lambda token_ids: RuntimeError("a planted crash")
    assert worker.run() == []
    assert "first rows of 1 sequences failed" in caplog.text
    worker.runner.crash_on = lambda token_ids: None
    worker.ask(best[1:2], number=2, base=N + 1)
    (event,) = worker.it.step()
    assert event.verdict.token_ids == best[1:3]


@pytest.mark.parametrize("proposed", [0, 2])
def test_a_nan_row_fails_only_its_round(proposed: int) -> None:
    best, worker = right(5), waiting()
    worker.runner.spoil = lambda prefix: len(prefix) == N + 1
    worker.run()
    worker.runner.spoil = lambda prefix: False
    events = worker.ask(best[1 : 1 + proposed], number=2, base=N + 1)
    assert isinstance(failure(events), InternalError)
    # Asked again it is computed again.
    worker.ask(best[1 : 1 + proposed], number=2, base=N + 1)
    (event,) = worker.it.step()
    assert event.verdict.token_ids == best[1 : 2 + proposed]


def test_a_late_continuation_is_decided_by_the_row() -> None:
    best, worker = right(3), waiting()
    worker.run()
    late = VerifyAhead("s", 1, 1, N, {Outcome(0, best[0]): Proposal((wrong(best[1]), 0))})
    (event,) = worker.it.handle(late, 0.0)
    assert (event.round, event.verdict.token_ids) == (2, (best[1],))


def test_rounds_with_and_without_a_row_share_a_pass() -> None:
    best, worker = right(6), waiting()
    worker.run()
    worker.open("t")
    worker.ask(best[:2], name="t")
    worker.ask(best[1:4], number=2, base=N + 1)
    worker.open("u")
    worker.ask(name="u")
    events = {event.sequence_id: event.verdict.token_ids for event in worker.it.step()}
    assert events == {"t": best[:3], "s": best[1:5], "u": best[:1]}


def test_a_precomputing_pass_respects_its_budget() -> None:
    worker = waiting(max_batch_tokens=33, max_sequences=50, num_blocks=200)
    join(worker, *map(str, range(40)))
    worker.run()
    assert worker.runner.passes == [33, 8]
    assert {worker.length(f"{i}") for i in range(40)} == {N + 1}


@pytest.mark.parametrize("count", [1, 3])
def test_a_waiting_row_keeps_no_others_memory(count: int) -> None:
    """Each row waits as long as its own sequence does."""
    worker = waiting()
    join(worker, *map(str, range(1, count)))
    worker.run()
    assert worker.runner.passes == [count]
    rows = [row.logits for row in worker.it._precomputed._rows.values()]
    assert [row.untyped_storage().nbytes() for row in rows] == [VOCAB * 4] * count
