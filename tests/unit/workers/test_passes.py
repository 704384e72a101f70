"""One pass over the ready jobs, and failures of single sequences."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from paceline.core.messages import OpenSequence
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.layout import SequenceInput
from paceline.engine.scheduling import passes
from paceline.engine.scheduling.passes import Job, PassResult, broken_rows, run_pass
from paceline.engine.scheduling.sequences import RETRY_SECONDS, HeldSequence, HeldSequences
from paceline.engine.scheduling.session import Session
from tests.sim.toys import ToyModel, ToyRunner

PARAMS = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 1)
MODEL = ToyModel(9)


def run(jobs: Sequence[Job], runner: ToyRunner, budget: int, clock: ManualClock) -> PassResult:
    """A pass of a worker that holds nothing else."""
    return run_pass(jobs, runner, budget, clock, HeldSequences(runner.new_states(), 9, clock, 1.0))


def job(runner: ToyRunner, name: str, feed: Sequence[int], rows: int = 1, arrived: float = 0.0) -> Job:
    session: Session[object] = Session(name, 1, PARAMS, list(feed))
    return Job(HeldSequence(session, runner.new_states().new("")), list(feed), rows, arrived)


def names(jobs: Sequence[Job]) -> list[str]:
    return [job.sequence_id for job in jobs]


def logits_of(tokens: Sequence[int], rows: int) -> torch.Tensor:
    return torch.from_numpy(MODEL.rows(tokens, rows))


def test_sequences_share_a_pass_and_keep_their_row_order() -> None:
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


def test_a_prompt_is_read_in_small_chunks_beside_others() -> None:
    """A sequence between rounds counts: its next round may arrive during the pass."""
    runner, clock = ToyRunner(MODEL), ManualClock()
    sequences: HeldSequences[object] = HeldSequences(runner.new_states(), 9, clock, 1.0)
    sequences.open(OpenSequence("long", 1, tuple(i % 9 for i in range(30)), PARAMS))
    long = Job(sequences.get("long"), [i % 9 for i in range(30)], 1, 0.0)
    run_pass([long], runner, 16, clock, sequences, beside=4)
    sequences.open(OpenSequence("running", 1, (1, 2), PARAMS))
    run_pass([long], runner, 16, clock, sequences, beside=4)
    other = Job(sequences.get("running"), [1, 2], 2, 0.0)
    run_pass([long, other], runner, 16, clock, sequences, beside=4)
    assert runner.passes == [16, 4, 6]


def test_only_sequences_without_blocks_fail() -> None:
    runner = ToyRunner(MODEL, num_blocks=2, block_size=4)
    jobs = [job(runner, "a", [1] * 4, 4), job(runner, "b", [2] * 8, 8), job(runner, "c", [3] * 3, 3)]
    result = run(jobs, runner, 40, ManualClock())
    assert names(result.finished) == ["a", "c"]
    ((failed, error),) = result.failed
    assert failed.sequence_id == "b"
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after == RETRY_SECONDS, "others hold some"


def test_capacity_includes_the_last_blocks_free_room() -> None:
    runner = ToyRunner(MODEL, num_blocks=1, block_size=4)
    it = job(runner, "a", [1, 2, 3], 1)
    run([it], runner, 40, ManualClock())
    it.feed_next([4], 1)
    assert names(run([it], runner, 40, ManualClock()).finished) == ["a"]
    it.feed_next([5], 1)
    assert len(run([it], runner, 40, ManualClock()).failed) == 1


def test_a_pass_without_room_reports_and_runs_nothing() -> None:
    runner = ToyRunner(MODEL, num_blocks=1, block_size=1)
    result = run([job(runner, "a", [1, 2], 1)], runner, 40, ManualClock())
    assert (len(result.failed), result.finished, result.logits, runner.passes) == (1, [], None, [])
    error = result.failed[0][1]
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after is None, "there is nobody whose end would help"


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


def test_tensors_of_a_failed_pass_are_freed_before_retrying(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lack of memory the error would keep them alive."""
    made: list[weakref.ref[torch.Tensor]] = []
    kept: list[bool] = []

    class Hungry(ToyRunner):
        def forward(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
            if made:
                kept.append(made[0]() is not None)
                return super().forward(inputs)
            taken = torch.zeros(4)
            made.append(weakref.ref(taken))
            raise torch.OutOfMemoryError("CUDA out of memory")

    # pytest keeps what is logged, the error with it.
    monkeypatch.setattr(passes.log, "disabled", True)
    runner = Hungry(MODEL)
    result = run([job(runner, "a", [1, 2], 2), job(runner, "b", [3], 1)], runner, 40, ManualClock())
    assert names(result.finished) == ["a", "b"]
    assert kept == [False, False]


def test_a_dead_device_ends_more_than_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is restarted; otherwise it would fail every request and report itself healthy."""

    def dead() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    runner = ToyRunner(MODEL)
    runner.crash_on = crash_on(7, RuntimeError("broken kernel"))  # type: ignore[assignment]
    monkeypatch.setattr("paceline.engine.scheduling.passes.ensure_alive", dead)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run([job(runner, "a", [1, 2], 2), job(runner, "b", [7, 7], 2)], runner, 40, ManualClock())


def test_a_known_error_of_one_sequence_is_passed_on() -> None:
    runner = ToyRunner(MODEL)
    known = InvalidArgumentError("token_ids", "too long")
    runner.crash_on = crash_on(7, known)  # type: ignore[assignment]
    result = run([job(runner, "b", [7])], runner, 40, ManualClock())
    assert result.failed[0][1] is known
    assert result.logits is None


def test_a_failed_prefill_chunk_keeps_the_earlier_ones() -> None:
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


def test_timings_separate_waiting_from_computing() -> None:
    clock = ManualClock(10.0)
    runner = SlowRunner(MODEL)
    runner.clock = clock
    long, short = job(runner, "long", [1] * 12, 1, arrived=8.0), job(runner, "short", [2, 3], 2, arrived=9.0)
    run([long, short], runner, 8, clock)
    first = short.timings()
    assert (first.queue, first.compute, first.rows, first.sequences) == (1.0, 1.0, 8, 2)
    assert (first.prefill, first.prefill_rows) == (0.0, 6), "another one's"
    run([long], runner, 8, clock)
    second = long.timings()
    assert (second.queue, second.compute, second.rows, second.sequences) == (2.0, 2.0, 6, 1)
    assert (second.prefill, second.prefill_rows) == (6 / 8 + 5 / 6, 5)


@pytest.mark.parametrize(
    ("arrived", "rows"), [(9.0, 6), (10.0, 6), (10.25, 4), (10.5, 3), (11.0, 0), (12.0, 0)]
)
def test_a_round_arriving_in_a_pass_counts_its_prompt_rows(arrived: float, rows: int) -> None:
    clock = ManualClock(10.0)
    runner = SlowRunner(MODEL)
    runner.clock = clock
    jobs = [job(runner, "long", [1] * 12, 1), job(runner, "short", [2, 3], 2)]
    sequences: HeldSequences[object] = HeldSequences(runner.new_states(), 9, clock, 1.0)
    assert sequences.prefill_rows_since(0.0) == 0
    run_pass(jobs, runner, 8, clock, sequences)
    assert sequences.prefill_rows_since(arrived) == rows


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


# ---- room ------------------------------------------------------------------------------------------


class Crowd:
    """Sequences of one worker in order of age, each with as many entries as named."""

    def __init__(self, num_blocks: int, **entries: int) -> None:
        self.clock = ManualClock()
        self.runner = ToyRunner(MODEL, num_blocks, block_size=4)
        self.sequences: HeldSequences[object] = HeldSequences(self.runner.new_states(), 99, self.clock, 1.0)
        for name, count in entries.items():
            self.sequences.open(OpenSequence(name, 1, tuple([1] * (count + 1)), PARAMS))
            if count:
                self.run(self.job(name, count))

    def job(self, name: str, count: int) -> Job:
        held = self.sequences.find(name)
        assert held is not None
        return Job(held, [1] * count, 1, self.clock())

    def run(self, *jobs: Job, spare: Callable[[], bool] = lambda: False, budget: int = 99) -> PassResult:
        return run_pass(jobs, self.runner, budget, self.clock, self.sequences, spare)

    def lengths(self) -> list[int]:
        return [held.table.length for held in self.sequences]


def test_the_youngest_gives_its_blocks_to_the_oldest() -> None:
    crowd = Crowd(3, a=4, b=4, c=4)
    young, old = crowd.job("c", 1), crowd.job("a", 1)
    result = crowd.run(young, old)
    assert names(result.finished) == ["a"]
    assert [job for job, _ in result.failed] == [young]
    assert crowd.lengths() == [5, 4, 0]
    assert crowd.sequences.num_preemptions == 1


def test_an_idle_sequence_is_preempted_silently() -> None:
    crowd = Crowd(3, a=4, b=4, c=4)
    result = crowd.run(crowd.job("a", 1))
    assert (names(result.finished), result.failed) == (["a"], [])
    assert crowd.lengths() == [5, 4, 0]
    assert crowd.sequences.num_preemptions == 1


def test_the_youngest_yields_when_it_lacks_room() -> None:
    crowd = Crowd(3, a=4, b=4, c=4)
    result = crowd.run(crowd.job("a", 1), crowd.job("b", 1), crowd.job("c", 1))
    assert names(result.finished) == ["a"]
    assert {job.sequence_id for job, _ in result.failed} == {"b", "c"}
    assert crowd.lengths() == [5, 0, 0]
    assert crowd.sequences.num_preemptions == 2


def test_only_as_many_as_needed_are_preempted() -> None:
    crowd = Crowd(5, a=4, b=4, c=4, d=4, e=4)
    crowd.run(crowd.job("a", 7))
    assert crowd.lengths() == [11, 4, 4, 0, 0]


def test_a_new_sequence_waits_for_its_whole_feeds_room() -> None:
    """Admitted chunk by chunk, it would compute entries that are preempted again."""
    crowd = Crowd(4, a=4, b=0)
    new = crowd.job("b", 13)
    result = crowd.run(new, budget=8)
    assert [job for job, _ in result.failed] == [new]
    assert crowd.lengths() == [4, 0]
    assert crowd.sequences.num_preemptions == 0, "it had nothing to lose"
    assert crowd.run(crowd.job("b", 12), budget=8).failed == []


def test_an_older_restarting_sequence_takes_younger_ones_blocks() -> None:
    crowd = Crowd(4, a=0, b=8, c=8)
    result = crowd.run(crowd.job("a", 9), crowd.job("c", 1))
    assert names(result.finished) == ["a"]
    assert crowd.lengths() == [9, 0, 0]


def test_spare_blocks_are_freed_before_any_sequence() -> None:
    crowd = Crowd(3, a=4, b=4)
    branches = crowd.runner.new_table()
    branches.reserve(4)
    asked = []

    def spare() -> bool:
        asked.append(1)
        branches.free()
        return True

    assert crowd.run(crowd.job("b", 1), spare=spare).failed == []
    assert (asked, crowd.sequences.num_preemptions) == ([1], 0)
    crowd.run(crowd.job("b", 1), spare=spare)
    assert asked == [1], "nothing was short"


def test_the_oldest_always_progresses() -> None:
    """With any requests and any memory: no livelock."""
    crowd = Crowd(4, a=1, b=1, c=1)
    left = 14
    for _ in range(left):
        jobs = [crowd.job(name, 1) for name in ("c", "b", "a")]
        assert "a" in names(crowd.run(*jobs).finished)
    assert crowd.lengths() == [15, 0, 0]


# ---- the prefix cache ------------------------------------------------------------------------------

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1]


class Cached:
    """A worker with a prefix cache."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.runner = ToyRunner(MODEL, block_size=4)
        self.sequences: HeldSequences[object] = HeldSequences(
            self.runner.new_states(prefix_cache=True), 99, self.clock, 1.0
        )

    def job(self, name: str, rows: int = 1, salt: str = "", proposed: Sequence[int] = ()) -> Job:
        params = replace(PARAMS, cache_salt=salt)
        self.sequences.open(OpenSequence(name, 1, tuple(PROMPT), params))
        return Job(self.sequences.get(name), [*PROMPT, *proposed], rows, 0.0)

    def run(self, *jobs: Job, budget: int = 99) -> PassResult:
        return run_pass(jobs, self.runner, budget, self.clock, self.sequences)

    @property
    def counts(self) -> tuple[int, int]:
        index = self.sequences.prefix_index
        assert index is not None
        return index.queries, index.hits


def test_cached_tokens_are_not_fed_again() -> None:
    worker = Cached()
    cold = worker.run(worker.job("a", 3, proposed=[4, 4])).logits
    warm = worker.run(worker.job("b", 3, proposed=[4, 4])).logits
    assert worker.runner.passes == [11, 3]
    assert cold is not None
    assert warm is not None
    assert torch.equal(cold, warm)
    assert worker.counts == (18, 8)


def test_cached_rows_that_are_wanted_are_fed_again() -> None:
    worker = Cached()
    worker.run(worker.job("a", 1, proposed=[]))
    worker.sequences.open(OpenSequence("b", 1, tuple(PROMPT[:8]), PARAMS))
    result = worker.run(Job(worker.sequences.get("b"), PROMPT[:8], 1, 0.0))
    assert worker.runner.passes == [9, 4]
    assert result.logits is not None
    assert torch.equal(result.logits, logits_of(PROMPT[:8], 1))


def test_another_salt_computes_everything() -> None:
    worker = Cached()
    worker.run(worker.job("a", salt="one"))
    worker.run(worker.job("b", salt="two"))
    worker.run(worker.job("c", salt="one"))
    assert worker.runner.passes == [9, 9, 1]


def test_a_scored_feed_computes_every_row() -> None:
    worker = Cached()
    worker.run(worker.job("a"))
    job = worker.job("b")
    job.scored = True
    result = worker.run(job)
    assert worker.runner.passes == [9, 9]
    assert sum(len(part.logits) for part in result.scored) == 8
    assert worker.counts == (9, 0)


def test_a_proposal_is_not_cached_before_it_is_committed() -> None:
    worker = Cached()
    worker.run(worker.job("a", 4, proposed=[2, 3, 4]))
    index = worker.sequences.prefix_index
    assert index is not None
    assert len(index) == 2
    held = worker.sequences.get("a")
    held.session.tokens += [2, 3, 4]
    worker.run(Job(held, [4], 1, 0.0))
    assert len(index) == 3


def test_a_waiting_sequence_uses_blocks_computed_meanwhile() -> None:
    worker = Cached()
    first, second = worker.job("a"), worker.job("b")
    while not second.offset:
        worker.run(*(job for job in (first, second) if job.remaining), budget=9)
    assert (second.reused, second.remaining) == (8, 0)
    assert (first.timings().cached_tokens, second.timings().cached_tokens) == (0, 8)
    assert worker.runner.passes == [9, 1]


def test_without_a_cache_nothing_is_kept() -> None:
    crowd = Crowd(8, a=8, b=0)
    crowd.sequences.drop("a")
    assert crowd.runner.pool.cached_blocks == 0
    assert crowd.sequences.prefix_index is None
