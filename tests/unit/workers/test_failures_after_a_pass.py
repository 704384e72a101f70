"""A failure after a pass, in judging or drawing, ends one sequence and no other.

It must not end the engine thread, which would end every sequence of the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draft_worker.sampling.draw import DrawStep, draw_tokens
from paceline.core.errors import InternalError, InvalidArgumentError, PacelineError
from paceline.core.messages import DraftProposal, RoundVerdict, SequenceFailed
from paceline.core.types import SamplingParams
from paceline.decoding.logprobs import reported_logprobs
from target_worker import engine, verdicts, verify
from target_worker.acceptance.items import VerifyItem
from target_worker.verify import verify_items
from tests.unit.workers import test_draft_engine, test_logprob_reports, test_target_engine
from tests.unit.workers.test_target_engine import PROMPT, right

BAD = (5, 5, 1)
OTHERS = {"first": PROMPT, "last": PROMPT}
ERRORS = [RuntimeError("5 5 is what the text says"), InvalidArgumentError("logit_bias", "is odd")]


def check_told(event: Any, error: Exception, log: str) -> None:
    """Errors that were raised on purpose as they are; of others no text but in the log."""
    assert isinstance(event, SequenceFailed)
    assert event.sequence_id == "bad"
    if isinstance(error, PacelineError):
        assert event.error is error
    else:
        assert isinstance(event.error, InternalError)
        assert str(error) not in event.error.message
        assert str(error) in log


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failing_judgement_ends_one_round(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(items: Sequence[VerifyItem], *rest: Any) -> Any:
        if any(tuple(item.ledger) == BAD for item in items):
            raise error
        return verify_items(items, *rest)

    worker, best = test_target_engine.Worker(), right(3)
    for name, tokens in (OTHERS | {"bad": BAD}).items():
        worker.open(name, tokens)
        worker.ask(best[:2], name)
    with monkeypatch.context() as patched:
        patched.setattr(verify, "verify_items", broken)
        events = {event.sequence_id: event for event in worker.run()}
    check_told(events.pop("bad"), error, caplog.text)
    assert {name: event.verdict.token_ids for name, event in events.items()} == dict.fromkeys(OTHERS, best)
    assert len(worker.runner.passes) == 1
    assert worker.length("bad") == len(BAD) - 1
    assert worker.ask(best[:2], "bad") == [], "the same round may be asked again"
    (event,) = worker.run()
    assert isinstance(event, RoundVerdict)


def test_a_dead_device_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's faults appear when its results are awaited in judging."""

    def dead(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    worker, best = test_target_engine.Worker(), right(3)
    for name in ("one", "two"):
        worker.open(name, PROMPT)
        worker.ask(best[:2], name)
    monkeypatch.setattr(verify, "verify_items", dead)
    monkeypatch.setattr("paceline.engine.scheduling.passes.ensure_alive", dead)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.run()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failing_draw_ends_one_round(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(steps: Sequence[DrawStep], *rest: Any) -> Any:
        if any(tuple(step.ledger) == BAD and step.drafts for step in steps):
            raise error
        return draw_tokens(steps, *rest)

    worker, best = test_draft_engine.Worker(), test_draft_engine.best(3)
    for name, tokens in (OTHERS | {"bad": BAD}).items():
        worker.open(name, tokens)
        worker.ask(3, name)
    with monkeypatch.context() as patched:
        patched.setattr("draft_worker.sampling.sampler.draw_tokens", broken)
        events = {event.sequence_id: event for event in worker.run()}
    check_told(events.pop("bad"), error, caplog.text)
    drafted = {name: event.proposal.token_ids for name, event in events.items()}
    assert drafted == dict.fromkeys(OTHERS, best)
    assert worker.cached("bad") == [*BAD[:-1]]
    assert worker.ask(3, "bad") == [], "the same round may be asked again"
    (event,) = worker.run()
    assert isinstance(event, DraftProposal)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failing_prompt_report_ends_one_sequence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Any:
        if 2 in counts:
            raise error
        return reported_logprobs(logits, tokens, counts)

    worker, prompt = test_logprob_reports.Worker(monkeypatch), test_logprob_reports.LONG[:12]
    monkeypatch.setattr(verdicts, "reported_logprobs", broken)
    for name, count in (("bad", 2), ("well", 1)):
        worker.open(name, prompt, prompt_logprobs=count)
        worker.ask(name, len(prompt))
    events = worker.run()
    (failed,) = [event for event in events if event.sequence_id == "bad"]
    check_told(failed, error, caplog.text)
    others = [event for event in events if event is not failed]
    (verdict,) = test_logprob_reports.check_prompt(others, "well", prompt, 1)
    assert isinstance(verdict, RoundVerdict)


@pytest.mark.parametrize("alone", ["the model", "the same again"])
def test_scored_rows_out_of_memory_end_one_sequence(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass's scored rows must not be used after their sequence failed."""
    worker, prompt = test_logprob_reports.Worker(monkeypatch), test_logprob_reports.LONG[:6]
    worker.open("bad", prompt, prompt_logprobs=1)
    worker.ask("bad", len(prompt))

    def full(*_: Any) -> Any:
        if alone == "the model":
            worker.runner.crash_on = lambda token_ids: RuntimeError()
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", full)
        (event,) = worker.it.step()
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, InternalError)
    worker.runner.crash_on = lambda token_ids: None
    worker.ask("bad", len(prompt))
    (verdict,) = test_logprob_reports.check_prompt(worker.run(), "bad", prompt, 1)
    assert isinstance(verdict, RoundVerdict)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failing_precomputed_report_ends_one_round(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The row was computed before its round, which is judged when it arrives."""

    def broken(*_: Any) -> Any:
        raise error

    worker = test_target_engine.Worker()
    worker.runner.cancellable = True
    worker.open("bad", sampling=SamplingParams(temperature=0, seed=1, logprobs=1))
    worker.ask((), "bad")
    worker.run()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "with_logprobs", broken)
        (failed,) = worker.ask((), "bad", number=2, base=len(PROMPT) + 1)
    check_told(failed, error, caplog.text)
    assert worker.ask((), "bad", number=2, base=len(PROMPT) + 1) == [], "the same round may be asked again"
    (event,) = worker.it.step()
    assert event.verdict.token_ids == right(2)[1:]
