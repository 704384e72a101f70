"""One pass over what is ready, and whose failure is whose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.batch import SequenceInput
from paceline.engine.holdings import Held, Holdings
from paceline.engine.passes import Job, PassResult, broken_rows, run_pass
from paceline.engine.session import Session
from tests.sim.toys import ToyModel, ToyRunner

PARAMS = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 1)
MODEL = ToyModel(9)


def run(jobs: Sequence[Job], runner: ToyRunner, budget: int, clock: ManualClock) -> PassResult:
    """A pass of a worker that holds nothing else."""
    return run_pass(jobs, runner, budget, clock, Holdings(runner.new_table, 9, clock, 1.0))


def job(runner: ToyRunner, name: str, feed: Sequence[int], rows: int = 1, arrived: float = 0.0) -> Job:
    session: Session[object] = Session(name, 1, PARAMS, list(feed))
    return Job(Held(session, runner.new_table()), list(feed), rows, arrived)


def names(jobs: Sequence[Job]) -> list[str]:
    return [job.sequence_id for job in jobs]


def logits_of(tokens: Sequence[int], rows: int) -> torch.Tensor:
    return torch.from_numpy(MODEL.rows(tokens, rows))


def test_several_sequences_share_a_pass_and_keep_their_rows_in_order() -> None:
    runner = ToyRunner(MODEL)
    jobs = [job(runner, "a", [1, 2, 3], 3), job(runner, "b", [4, 5], 1), job(runner, "c", [6], 1)]
    result = run(jobs, runner, 40, ManualClock())
    assert runner.passes == [6]
    # Short feeds come first; whoever reads the logits goes by `finished`.
    assert names(result.finished) == ["a", "c", "b"]
    assert result.logits is not None
    want = torch.cat([logits_of([1, 2, 3], 3), logits_of([6], 1), logits_of([4, 5], 1)])
    assert torch.equal(result.logits, want)


def test_a_long_prompt_is_fed_in_chunks() -> None:
    runner = ToyRunner(MODEL)
    prompt = [i % 9 for i in range(20)]
    it = job(runner, "a", prompt, 2)
    finished = []
    for _ in range(3):
        result = run([it], runner, 8, ManualClock())
        finished.append(bool(result.finished))
    assert (finished, runner.passes) == ([False, False, True], [8, 8, 4])
    assert result.logits is not None
    assert torch.equal(result.logits, logits_of(prompt, 2))
    assert it.held.session.cached == prompt


def test_only_sequences_whose_rows_find_no_blocks_fail() -> None:
    runner = ToyRunner(MODEL, num_blocks=2, block_size=4)
    jobs = [job(runner, "a", [1] * 4, 4), job(runner, "b", [2] * 8, 8), job(runner, "c", [3] * 3, 3)]
    result = run(jobs, runner, 40, ManualClock())
    assert names(result.finished) == ["a", "c"]
    ((failed, error),) = result.failed
    assert failed.sequence_id == "b"
    assert isinstance(error, ResourceExhaustedError)


def test_capacity_counts_the_room_left_in_a_sequences_last_block() -> None:
    runner = ToyRunner(MODEL, num_blocks=1, block_size=4)
    it = job(runner, "a", [1, 2, 3], 1)
    run([it], runner, 40, ManualClock())
    it.feed_next([4], 1)
    assert names(run([it], runner, 40, ManualClock()).finished) == ["a"]
    it.feed_next([5], 1)
    assert len(run([it], runner, 40, ManualClock()).failed) == 1


def test_a_pass_without_any_room_reports_and_runs_nothing() -> None:
    runner = ToyRunner(MODEL, num_blocks=1, block_size=1)
    result = run([job(runner, "a", [1, 2], 1)], runner, 40, ManualClock())
    assert (len(result.failed), result.finished, result.logits, runner.passes) == (1, [], None, [])


def crash_on(token: int, error: Exception) -> object:
    return lambda token_ids: error if token in token_ids else None


def test_one_sequences_failure_in_a_batch_is_its_own() -> None:
    runner = ToyRunner(MODEL)
    runner.crash_on = crash_on(7, RuntimeError("broken kernel"))  # type: ignore[assignment]
    jobs = [job(runner, "a", [1, 2], 2), job(runner, "b", [7, 7], 2), job(runner, "c", [3, 4], 2)]
    result = run(jobs, runner, 40, ManualClock())
    assert names(result.finished) == ["a", "c"]
    ((failed, error),) = result.failed
    assert failed.sequence_id == "b"
    assert isinstance(error, InternalError)
    assert "kernel" not in str(error), "exception text stays in the log"
    assert result.logits is not None
    assert torch.equal(result.logits, torch.cat([logits_of([1, 2], 2), logits_of([3, 4], 2)]))
    assert failed.held.table.length == 0
    assert [len(j.held.session.cached) for j in jobs] == [2, 0, 2]


def test_a_known_error_of_one_sequence_is_passed_on() -> None:
    runner = ToyRunner(MODEL)
    known = InvalidArgumentError("token_ids", "too long")
    runner.crash_on = crash_on(7, known)  # type: ignore[assignment]
    result = run([job(runner, "b", [7])], runner, 40, ManualClock())
    assert result.failed[0][1] is known
    assert result.logits is None


def test_a_failed_chunk_of_a_prefill_leaves_the_earlier_ones() -> None:
    runner = ToyRunner(MODEL)
    it = job(runner, "a", [1, 2, 3, 7, 5, 6], 1)
    runner.crash_on = crash_on(7, RuntimeError())  # type: ignore[assignment]
    run([it], runner, 3, ManualClock())
    result = run([it], runner, 3, ManualClock())
    assert len(result.failed) == 1
    assert it.held.session.cached == [1, 2, 3] == runner.read(it.held.table)


class SlowRunner(ToyRunner):
    """Takes a second a pass."""

    clock: ManualClock

    def forward(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        self.clock.advance(1.0)
        return super().forward(inputs)


def test_timings_tell_waiting_from_computing() -> None:
    clock = ManualClock(10.0)
    runner = SlowRunner(MODEL)
    runner.clock = clock
    long, short = job(runner, "long", [1] * 12, 1, arrived=8.0), job(runner, "short", [2, 3], 2, arrived=9.0)
    run([long, short], runner, 8, clock)
    first = short.timings()
    assert (first.queue, first.compute, first.rows, first.sequences) == (1.0, 1.0, 8, 2)
    run([long], runner, 8, clock)
    second = long.timings()
    assert (second.queue, second.compute, second.rows, second.sequences) == (2.0, 2.0, 6, 1)


@pytest.mark.parametrize(
    ("row", "broken"),
    [
        ([0.0, 1.0], False),
        ([0.0, -torch.inf], False),
        ([0.0, torch.nan], True),
        ([torch.nan, torch.nan], True),
        ([0.0, torch.inf], True),
        ([-torch.inf, torch.inf], True),
        ([-torch.inf, -torch.inf], True),
        ([-torch.inf, torch.nan], True),
    ],
)
def test_rows_that_are_no_distribution_are_found(row: list[float], broken: bool) -> None:
    assert broken_rows(torch.tensor([[1.0, 2.0], row])) == [False, broken]
