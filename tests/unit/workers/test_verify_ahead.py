"""A target worker that knows the next round begins it without a command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import CloseSequence, RoundVerdict, SequenceFailed, VerifyAhead, VerifyRound
from paceline.core.types import Outcome, Proposal, SamplingParams, SparseDistribution
from tests.sim.world import SteppedEngine
from tests.unit.workers.test_target_engine import GREEDY, PROMPT, VOCAB, Worker, right

N = len(PROMPT)


def foresee(
    worker: Worker, proposals: dict[tuple[int, int], Proposal], epoch: int = 1, number: int = 1, base: int = N
) -> list[Any]:
    return list(worker.it.handle(VerifyAhead("s", epoch, number, base, proposals), 0.0))


def asked(proposal: tuple[int, ...]) -> Worker:
    worker = Worker()
    worker.open()
    worker.ask(proposal)
    return worker


def verdicts(events: list[Any]) -> list[Any]:
    assert all(isinstance(event, RoundVerdict) for event in events)
    return [event.verdict for event in events]


def test_the_next_round_runs_without_a_message() -> None:
    best = right(8)
    worker = asked(best[:2])
    assert foresee(worker, {Outcome(2, best[2]): Proposal(best[3:5]), Outcome(0, 5): Proposal((0,))}) == []
    first, second = worker.run()
    assert (first.round, second.round) == (1, 2)
    assert (first.verdict.went_on_with, second.verdict.went_on_with) == (2, None)
    assert first.verdict.token_ids + second.verdict.token_ids == best[:6]
    assert worker.length() == N + 5
    # The coordinator's own message for the same round, had it been sent, changes nothing.
    assert verdicts(worker.ask(best[3:5], number=2, base=N + 3)) == [second.verdict]
    assert not worker.it.has_work


def test_an_unforeseen_outcome_waits_for_its_round() -> None:
    best = right(8)
    worker = asked(best[:2])
    foresee(worker, {Outcome(1, best[2]): Proposal(best[3:5])})
    (verdict,) = verdicts(worker.run())
    assert verdict.went_on_with is None
    worker.ask(best[3:5], number=2, base=N + 3)
    assert verdicts(worker.run())[0].token_ids == best[3:6]


def test_later_continuations_add_to_earlier_ones() -> None:
    best = right(8)
    worker = asked(best[:2])
    foresee(worker, {Outcome(0, 1): Proposal((1,))})
    foresee(worker, {Outcome(2, best[2]): Proposal(best[3:5])})
    assert len(worker.run()) == 2


@pytest.mark.parametrize("usable", [True, False], ids=["usable", "refused"])
def test_a_continuation_arriving_in_the_pass_is_used(usable: bool) -> None:
    """A command waits for the step's end; by then the verdict would be out."""
    best, worker = right(8), Worker()
    events: list[Any] = []
    worker.open()
    engine = SteppedEngine(worker.it, "engine", worker.clock)
    following = Proposal(best[3:5] if usable else (VOCAB,))
    forward = worker.runner.forward

    def during(inputs: Any) -> Any:
        worker.runner.forward = forward  # type: ignore[method-assign]
        engine.submit(events.extend, [VerifyAhead("s", 1, 1, N, {Outcome(2, best[2]): following})])
        return forward(inputs)

    worker.runner.forward = during  # type: ignore[method-assign]
    engine.submit(events.extend, [VerifyRound("s", 1, 1, N, (), Proposal(best[:2]))])
    for _ in range(2):
        engine.take_up()
        engine.step()
    judged = [event for event in events if isinstance(event, RoundVerdict)]
    assert [event.verdict.went_on_with for event in judged] == ([2, None] if usable else [None])
    assert len(events) - len(judged) == (not usable), "what is refused is said, once"


@pytest.mark.parametrize("place", [{"epoch": 2}, {"number": 2}, {"number": 0}, {"base": N + 1}])
def test_continuations_of_another_round_are_dropped(place: dict[str, int]) -> None:
    best = right(8)
    worker = asked(best[:2])
    assert foresee(worker, {Outcome(2, best[2]): Proposal(best[3:5])}, **place) == []
    assert len(worker.run()) == 1


def test_a_continuation_just_after_the_verdict_is_used() -> None:
    best = right(8)
    worker = asked(best[:2])
    assert verdicts(worker.run())[0].went_on_with is None
    told = {Outcome(0, 5): Proposal((0,)), Outcome(2, best[2]): Proposal(best[3:5])}
    assert foresee(worker, told) == []
    assert worker.it.has_work
    # Told again, also in more words, and asked by the coordinator: it is the same round.
    longer = {Outcome(2, best[2]): Proposal(best[3:6])}
    assert [*foresee(worker, told), *foresee(worker, longer)] == []
    assert worker.ask(best[3:5], number=2, base=N + 3) == []
    (verdict,) = verdicts(worker.run())
    assert (verdict.token_ids, worker.length()) == (best[3:6], N + 5)
    assert verdicts(worker.ask(best[3:5], number=2, base=N + 3)) == [verdict]
    assert not worker.it.has_work


def test_a_past_rounds_continuation_begins_nothing() -> None:
    """The next round was asked for, and a continuation of the last one comes again."""
    best = right(8)
    worker = asked(best[:2])
    worker.run()
    worker.ask((), number=2, base=N + 3)
    told = {Outcome(2, best[2]): Proposal(best[3:5])}
    assert foresee(worker, told) == []
    (verdict,) = verdicts(worker.run())
    assert verdict.token_ids == best[3:4]
    assert foresee(worker, told) == []
    assert not worker.it.has_work


def test_a_late_continuation_of_another_outcome_is_dropped() -> None:
    best = right(8)
    worker = asked(best[:2])
    worker.run()
    assert (
        foresee(worker, {Outcome(1, best[2]): Proposal(best[3:5]), Outcome(2, best[2] ^ 1): Proposal((0,))})
        == []
    )
    assert foresee(worker, {Outcome(2, best[2]): Proposal(best[3:5])}, base=N + 1) == []
    assert not worker.it.has_work


def test_an_invalid_late_continuation_is_refused() -> None:
    best = right(8)
    worker = asked(best[:2])
    worker.run()
    (failed,) = foresee(worker, {Outcome(2, best[2]): Proposal((VOCAB,))})
    assert isinstance(failed, SequenceFailed)
    assert (failed.round, type(failed.error)) == (1, InvalidArgumentError)
    assert not worker.it.has_work
    worker.ask(best[3:5], number=2, base=N + 3)
    assert verdicts(worker.run())[0].token_ids == best[3:6]


def test_a_closed_sequence_does_not_go_on() -> None:
    best = right(8)
    worker = asked(best[:2])
    foresee(worker, {Outcome(2, best[2]): Proposal(best[3:5])})
    worker.it.step()
    assert worker.it.has_work
    worker.it.handle(CloseSequence("s", 1), 0.0)
    assert not worker.it.has_work
    assert worker.runner.pool.used_blocks == 0


@pytest.mark.parametrize(
    ("proposal", "field"),
    [
        (Proposal((VOCAB,)), "proposal.token_ids"),
        (Proposal((1,) * 40, parents=tuple(range(-1, 39))), "proposal.parents"),
        (Proposal((1,), distributions=(SparseDistribution(b"\1\0\0\0", b"\0\0\x80\x3f"),)), "proposal.distr"),
        (Proposal((1,) * 60), "proposal.token_ids"),
    ],
    ids=["outside the vocabulary", "a large tree", "with distributions", "beyond the model's length"],
)
def test_an_invalid_continuation_fails_without_its_round(proposal: Proposal, field: str) -> None:
    best = right(8)
    worker = asked(best[:2])
    (failed,) = foresee(worker, {Outcome(2, best[2]): proposal})
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field.startswith(field)
    (verdict,) = verdicts(worker.run())
    assert verdict.went_on_with is None


def plain_next(worker: Worker, number: int = 1, base: int = N) -> list[Any]:
    ahead = VerifyAhead("s", 1, number, base, {}, plain_otherwise=True)
    return list(worker.it.handle(ahead, 0.0))


def test_plain_rounds_follow_while_announced() -> None:
    best = right(8)
    worker = asked(())
    tokens: tuple[int, ...] = ()
    for number in range(1, 6):
        plain_next(worker, number, N + number - 1)
        (event,) = worker.it.step()
        (verdict,) = verdicts([event])
        assert (event.round, verdict.went_on_with, worker.length()) == (number, 0, N + number - 1)
        tokens += verdict.token_ids
    (last,) = verdicts(worker.run())
    assert last.went_on_with is None
    assert tokens + last.token_ids == best[:6]


def test_a_plain_round_may_follow_any_unforeseen_outcome() -> None:
    best = right(8)
    for foreseen, went_on_with in ((best[2], 2), (best[2] ^ 1, 0)):
        worker = asked(best[:2])
        foresee(worker, {Outcome(2, foreseen): Proposal(best[3:5])})
        plain_next(worker)
        first, second = worker.run()
        assert first.verdict.went_on_with == went_on_with
        assert first.verdict.token_ids + second.verdict.token_ids == best[: 4 + went_on_with]


@pytest.mark.parametrize(
    ("sampling", "eos", "goes_on"),
    [
        (replace(GREEDY, stop_token_ids=right(1)), (), False),
        (GREEDY, right(1), False),
        (replace(GREEDY, ignore_eos=True), right(1), True),
    ],
    ids=["a stop token", "the end", "the end, ignored"],
)
def test_no_plain_round_follows_a_final_token(
    sampling: SamplingParams, eos: tuple[int, ...], goes_on: bool
) -> None:
    worker = Worker(eos=eos)
    worker.open(sampling=sampling)
    worker.ask(())
    plain_next(worker)
    assert len(worker.run()) == 1 + goes_on
    late = Worker(eos=eos)
    late.open(sampling=sampling)
    late.ask(())
    assert len(late.run()) == 1
    plain_next(late)
    assert len(late.run()) == goes_on


def test_no_plain_round_goes_beyond_the_models_length() -> None:
    worker = Worker(max_model_len=N)
    worker.open()
    worker.ask(())
    (failed,) = plain_next(worker)
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == "plain_otherwise"
    (verdict,) = verdicts(worker.run())
    assert verdict.went_on_with is None
