"""Log-probabilities on the target worker: of a verdict's tokens, and of a prompt in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from paceline.core.messages import OpenSequence, PromptLogprobs, RoundVerdict, SequenceFailed, VerifyRound
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams, TokenLogprobs
from target_worker.engine import TargetEngine
from tests.sim.toys import ToyModel, ToyRunner, target_config

VOCAB = 7
MODEL = ToyModel(VOCAB, seed=3)
LONG = tuple((3 * i + 1) % VOCAB for i in range(30))
ROWS = 8
"""Scored rows a pass."""


class Worker:
    """A target engine with a small budget, and short words for what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_blocks: int = 60) -> None:
        monkeypatch.setattr("paceline.engine.scheduling.planner.SCORED_ROWS", ROWS)
        self.runner = ToyRunner(MODEL, num_blocks, 4)
        self.it = TargetEngine(self.runner, target_config(), vocabulary_size=VOCAB, max_model_len=80)

    def open(self, name: str, tokens: tuple[int, ...], prompt_length: int = 0, **sampling: Any) -> list[Any]:
        params = SamplingParams(**{"temperature": 0, "seed": 1, **sampling})
        length = prompt_length or len(tokens)
        return self.it.handle(
            OpenSequence(name, 1, tokens, SequenceParams(params, AcceptanceMode.COUPLED, length)), 0.0
        )

    def ask(self, name: str, base: int, *proposal: int, number: int = 1) -> list[Any]:
        return self.it.handle(VerifyRound(name, 1, number, base, (), Proposal(proposal)), 0.0)

    def run(self) -> list[Any]:
        events: list[Any] = []
        while self.it.has_work:
            events += self.it.step()
        return events


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def check(entry: TokenLogprobs, prefix: tuple[int, ...], token_id: int, count: int) -> None:
    row = np.log(MODEL.probabilities(prefix))
    best = [int(token) for token in np.argsort(-row)]
    assert entry.token_id == token_id
    assert entry.rank == best.index(token_id) + 1
    assert list(entry.top_token_ids) == best[:count]
    wanted = [row[token_id], *row[best[:count]]]
    np.testing.assert_allclose([entry.logprob, *entry.top_logprobs], wanted, atol=1e-5)


def check_prompt(events: list[Any], name: str, prompt: tuple[int, ...], count: int) -> list[Any]:
    """All of the prompt is told of, once and in order, in front of the verdict; returns the other events."""
    parts = [e for e in events if isinstance(e, PromptLogprobs) and e.sequence_id == name]
    due = 1
    for part in parts:
        assert part.start == due
        assert len(part.logprobs) <= ROWS
        for entry in part.logprobs:
            check(entry, prompt[:due], prompt[due], count)
            due += 1
    assert due == len(prompt)
    others = [e for e in events if not isinstance(e, PromptLogprobs)]
    assert events.index(parts[-1]) < events.index(next(e for e in others if e.sequence_id == name))
    return others


def verdict(events: list[Any]) -> Any:
    (event,) = events
    assert isinstance(event, RoundVerdict)
    return event.verdict


def test_a_verdict_reports_each_of_its_tokens(worker: Worker) -> None:
    prompt = (1, 2, 3)
    worker.open("free", prompt)
    worker.ask("free", 3)
    first = verdict(worker.run()).token_ids[0]
    worker.open("s", prompt, logprobs=3, repetition_penalty=1.0001)
    worker.ask("s", 3, first, (first + 1) % VOCAB)
    told = verdict(worker.run())
    assert len(told.logprobs) == len(told.token_ids) == told.num_accepted + 1
    for i, (entry, token) in enumerate(zip(told.logprobs, told.token_ids, strict=True)):
        check(entry, (*prompt, *told.token_ids[:i]), token, 3)


def test_only_requested_reports_are_made(worker: Worker) -> None:
    counts = {"a": None, "b": 0, "c": None, "d": 20}
    for name, count in counts.items():
        worker.open(name, (1, 2, 3), logprobs=count)
        worker.ask(name, 3, 4, 5)
    for event in worker.run():
        count = counts[event.sequence_id]
        told = event.verdict.logprobs
        assert len(told) == (0 if count is None else len(event.verdict.token_ids))
        assert all(len(entry.top_token_ids) == min(count or 0, VOCAB) for entry in told)


def test_a_repeated_round_reports_the_same(worker: Worker) -> None:
    worker.open("s", (1, 2, 3), logprobs=2)
    worker.ask("s", 3)
    (first,) = worker.run()
    assert worker.ask("s", 3) == [first]


@pytest.mark.parametrize("length", [2, ROWS, ROWS + 1, ROWS + 2, 2 * ROWS, 2 * ROWS + 1, 30])
def test_a_prompt_is_reported_in_parts(worker: Worker, length: int) -> None:
    prompt = LONG[:length]
    worker.open("s", prompt, prompt_logprobs=2)
    worker.open("plain", prompt)
    worker.ask("s", length)
    worker.ask("plain", length)
    others = check_prompt(worker.run(), "s", prompt, 2)
    mine, plain = sorted(others, key=lambda event: event.sequence_id != "s")
    assert mine.verdict.token_ids == plain.verdict.token_ids
    assert plain.verdict.logprobs == ()


def test_a_prompt_of_one_token_has_nothing_to_report(worker: Worker) -> None:
    worker.open("s", (4,), prompt_logprobs=2)
    worker.ask("s", 1)
    assert verdict(worker.run()).num_accepted == 0


def test_a_proposal_in_the_first_round_is_judged_too(worker: Worker) -> None:
    prompt = LONG[:ROWS]
    worker.open("s", prompt, prompt_logprobs=0, logprobs=1)
    worker.ask("s", len(prompt), 1, 2, 3)
    told = verdict(check_prompt(worker.run(), "s", prompt, 0))
    assert len(told.logprobs) == len(told.token_ids)


def test_several_prompts_share_the_rows_of_a_pass(worker: Worker) -> None:
    lengths = {"a": 30, "b": 11, "c": 3}
    for name, length in lengths.items():
        worker.open(name, LONG[:length], prompt_logprobs=1)
        worker.ask(name, length)
    events = worker.run()
    for name, length in lengths.items():
        check_prompt([e for e in events if e.sequence_id == name], name, LONG[:length], 1)
    assert max(worker.runner.passes) <= ROWS


def test_a_prompt_is_not_reported_after_generated_tokens(worker: Worker) -> None:
    """A sequence reopened from its ledger goes on; its client has the prompt's report."""
    worker.open("s", LONG, prompt_length=20, prompt_logprobs=2)
    worker.ask("s", len(LONG))
    assert len(worker.run()) == 1
    assert max(worker.runner.passes) == len(LONG)


def test_a_prefill_out_of_blocks_reports_all_when_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch, num_blocks=8)
    worker.open("other", LONG[:12])
    worker.ask("other", 12)
    worker.run()
    worker.open("s", LONG[:28], prompt_logprobs=1)
    worker.ask("s", 28)
    *_, failed = worker.run()
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, ResourceExhaustedError)
    worker.it.drop("other")
    worker.ask("s", 28)
    check_prompt(worker.run(), "s", LONG[:28], 1)


@pytest.mark.parametrize("at", [3, 20, 26])
def test_broken_logits_inside_a_prompt_end_only_that_sequence(worker: Worker, at: int) -> None:
    worker.runner.spoil = lambda prefix: tuple(prefix) == LONG[:at]
    worker.open("s", LONG[:26], prompt_logprobs=1)
    worker.open("well", LONG[5:25], prompt_logprobs=1)
    worker.ask("s", 26)
    worker.ask("well", 20)
    events = worker.run()
    (failed,) = [e for e in events if e.sequence_id == "s" and not isinstance(e, PromptLogprobs)]
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InternalError)
    check_prompt([e for e in events if e.sequence_id == "well"], "well", LONG[5:25], 1)


@pytest.mark.parametrize(
    ("sampling", "bad_words", "field"),
    [
        ({"allowed_token_ids": [VOCAB]}, (), "allowed_token_ids"),
        ({"allowed_token_ids": [2]}, ((1, 2),), "allowed_token_ids"),
        ({}, ((1, VOCAB),), "bad_words"),
        ({}, tuple((token,) for token in range(VOCAB)), "bad_words"),
        ({"stop_token_ids": range(VOCAB), "min_tokens": 1}, (), "min_tokens"),
    ],
)
def test_parameters_leaving_no_token_are_refused(
    worker: Worker, sampling: dict[str, Any], bad_words: tuple[tuple[int, ...], ...], field: str
) -> None:
    params = SequenceParams(SamplingParams(seed=1, **sampling), AcceptanceMode.COUPLED, 1, bad_words)
    (failed,) = worker.it.handle(OpenSequence("s", 1, (1,), params), 0.0)
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == field
