"""Prompts that are read before their round."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from draft_worker.lookahead import prefill_ahead
from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError, ResourceExhaustedError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    SequenceFailed,
)
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.multi_step import ChainSkills
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, own_choice

VOCAB = 6
MODEL = ToyModel(VOCAB)
GREEDY = SamplingParams(temperature=0.0, seed=3)
PROMPT = tuple(i % VOCAB for i in range(10))


class TimedRunner(ToyRunner):
    """A pass takes a second."""

    clock: ManualClock

    def forward(self, inputs: Any) -> Any:
        self.clock.advance(1.0)
        return super().forward(inputs)


class Worker:
    """A draft engine that reads four tokens at a time."""

    def __init__(self, branches: int = 1, num_blocks: int = 50, **changes: Any) -> None:
        self.clock = ManualClock()
        self.runner = TimedRunner(MODEL, num_blocks, 4)
        self.runner.clock = self.clock
        config = draft_config(
            **{"support_mass": 0.9, "lookahead_branches": branches, "lookahead_sequences": 1} | changes
        )
        self.it = draft_engine(self.runner, config, vocabulary_size=VOCAB, max_model_len=60, clock=self.clock)

    def open(self, name: str = "s", epoch: int = 1) -> None:
        params = SequenceParams(GREEDY, AcceptanceMode.COUPLED, len(PROMPT))
        assert not self.it.handle(OpenSequence(name, epoch, PROMPT, params), 0.0)

    def ask(self, k: int = 2, name: str = "s") -> list[Any]:
        """The second round, behind the target's first token."""
        return list(self.it.handle(DraftRound(name, 1, 2, len(PROMPT) + 1, (3,), k), 0.0))

    def run(self) -> list[Any]:
        events: list[Any] = []
        while self.it.has_work:
            events += self.it.step()
        return events

    def answer(self) -> Any:
        """To the round in progress; then it is ahead of the verdict, which is another matter."""
        while not (events := self.it.step()):
            pass
        (event,) = events
        return event

    def cached(self, name: str = "s") -> list[int]:
        held = self.it.sequences.find(name)
        assert held is not None
        return self.runner.read(held.table)


@pytest.fixture(autouse=True)
def _four_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_ahead, "ROWS", 4)


def best(n: int) -> tuple[int, ...]:
    tokens = [*PROMPT, 3]
    for _ in range(n):
        tokens.append(own_choice(MODEL, tokens, GREEDY, 3))
    return tuple(tokens[len(PROMPT) + 1 :])


def test_an_opened_prompt_is_read_before_its_round() -> None:
    worker = Worker()
    worker.open()
    assert worker.run() == []
    assert worker.runner.passes == [4, 4, 2]
    assert worker.cached() == list(PROMPT)
    worker.ask()
    event = worker.answer()
    assert event.proposal.token_ids == best(2)
    assert worker.runner.passes == [4, 4, 2, 1, 1]
    assert event.timings.prefill == 3.0, "what was read before it was asked"


def test_a_round_takes_precedence_and_reads_the_rest() -> None:
    worker = Worker()
    worker.open()
    worker.open("other")
    worker.it.step()
    worker.ask()
    worker.it.step()
    assert worker.runner.passes == [4, 7], "nothing of the other one"
    event = worker.answer()
    assert event.proposal.token_ids == best(2)
    assert event.timings.prefill == pytest.approx(1 + 6 / 7)
    worker.run()
    assert worker.cached("other") == list(PROMPT)


def test_beside_others_a_prompt_is_read_in_smaller_pieces() -> None:
    worker = Worker(max_mixed_prefill_tokens=2)
    worker.open()
    worker.it.step()
    worker.open("other")
    worker.run()
    assert worker.runner.passes == [4, 2, 2, 2, 2], "the other one has the full blocks of the first"


def test_a_draft_without_lookahead_does_not_read_ahead() -> None:
    worker = Worker(branches=0)
    worker.open()
    assert not worker.it.has_work
    worker.ask()
    event = worker.answer()
    assert event.proposal.token_ids == best(2)


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("ending", ["close", "drop", "reopen"])
def test_a_closed_sequence_is_not_read_further(ending: str, passes: int) -> None:
    worker = Worker()
    worker.open()
    for _ in range(passes):
        worker.it.step()
    match ending:
        case "close":
            worker.it.handle(CloseSequence("s", 1), 0.0)
        case "drop":
            worker.it.drop("s")
        case _:
            worker.open(epoch=2)
            assert worker.it.has_work
            worker.run()
            assert worker.cached() == list(PROMPT)
            worker.it.drop("s")
    assert not worker.it.has_work
    assert worker.runner.pool.used_blocks == 0


@pytest.mark.parametrize("asked", [False, True])
def test_a_repeated_opening_changes_nothing(asked: bool) -> None:
    """Entries in use by a round and its branches are not fed again."""
    worker = Worker()
    worker.open()
    worker.it.step()
    if asked:
        worker.ask()
    worker.open()
    assert worker.it._prefill_ahead.has_work is not asked
    if not asked:
        worker.ask()
    event = worker.answer()
    assert event.proposal.token_ids == best(2)
    assert event.timings.prefill > 1.0, "the first pass is counted"


def test_without_room_reading_is_left_to_the_round() -> None:
    worker = Worker(num_blocks=2)
    worker.open()
    assert worker.run() == []
    assert worker.runner.pool.used_blocks == 0
    worker.ask()
    event = worker.answer()
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, ResourceExhaustedError)


def test_a_preempted_prompt_is_read_from_the_beginning() -> None:
    worker = Worker()
    worker.open()
    worker.it.step()
    held = worker.it.sequences.find("s")
    assert held is not None
    held.cut_to(0)
    worker.run()
    assert worker.cached() == list(PROMPT)


def test_a_failure_while_reading_ahead_is_left_to_the_round() -> None:
    worker = Worker()
    worker.open()
    worker.runner.crash_on = lambda token_ids: RuntimeError("broken") if token_ids[0] == 4 else None
    assert worker.run() == []
    worker.ask()
    event = worker.answer()
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, InternalError)
    worker.runner.crash_on = lambda token_ids: None
    worker.ask()
    again = worker.answer()
    assert isinstance(again, DraftProposal)
    assert again.proposal.token_ids == best(2)


def drafting_ahead(**changes: Any) -> Worker:
    """One sequence whose proposal is answered, for which nothing is drafted ahead yet."""
    worker = Worker(8, lookahead_sequences=2, **changes)
    worker.runner.chain_skills = ChainSkills(max_feed=16)
    worker.open()
    worker.run()
    worker.ask()
    assert isinstance(worker.answer(), DraftProposal)
    return worker


def test_grown_branches_are_sent_before_the_next_prompt() -> None:
    worker = drafting_ahead()
    worker.runner.stops = lambda cancel: bool(cancel.cancel())
    assert worker.it.step() == []
    worker.it.reset_cancel()
    worker.open("other")
    (event,) = worker.it.step()
    assert isinstance(event, Continuations)
    assert event.sequence_id == "s"
    held = worker.it.sequences.find("other")
    assert held is not None
    assert held.table.length == 0
    worker.run()
    assert worker.cached("other") == list(PROMPT)


def test_reading_ahead_and_drafting_ahead_take_turns() -> None:
    worker = drafting_ahead(prefix_cache=False)
    worker.open("other")
    steps: list[str] = []
    held = worker.it.sequences.find("other")
    assert held is not None
    while held.table.length < len(PROMPT):
        before = held.table.length
        told = worker.it.step()
        steps.append("read" if held.table.length > before else "told" if told else "drew")
    assert "told" in steps
    assert all("read" in pair for pair in itertools.pairwise(steps))


def test_a_read_ahead_pass_respects_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_ahead, "ROWS", 64)
    worker = Worker(max_batch_tokens=33)
    prompt = tuple(i % VOCAB for i in range(50))
    params = SequenceParams(GREEDY, AcceptanceMode.COUPLED, len(prompt))
    worker.it.handle(OpenSequence("s", 1, prompt, params), 0.0)
    worker.run()
    assert worker.runner.passes == [33, 17]
