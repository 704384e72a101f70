"""Which rounds a worker accepts, and which cached entries it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, StaleEpochError
from paceline.core.types import (
    AcceptanceMode,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    TreeShape,
)
from paceline.engine.scheduling.session import Disposition, Session, question_of

PARAMS = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 2)


def session(*tokens: int, epoch: int = 3) -> Session[str]:
    return Session("s", epoch, PARAMS, list(tokens or (1, 2, 3)))


def begin(
    it: Session[str], number: int, base: int, *tail: int, epoch: int = 3, question: Any = b"q"
) -> Disposition:
    return it.begin(epoch, number, base, tail, question)


def test_a_new_round_is_computed_with_its_tail() -> None:
    it = session()
    assert begin(it, 1, 5, 4, 5) is Disposition.COMPUTE
    assert it.tokens == [1, 2, 3, 4, 5]


def test_a_repeated_round_is_in_progress_then_answered_again() -> None:
    it = session()
    begin(it, 1, 3)
    assert begin(it, 1, 3) is Disposition.IN_PROGRESS
    it.finish("answer")
    assert begin(it, 1, 3, 2, 3) is Disposition.REPEAT
    assert (it.answer, it.tokens) == ("answer", [1, 2, 3])


def test_a_repeated_round_with_another_question_is_refused() -> None:
    it = session()
    begin(it, 1, 3)
    with pytest.raises(InvalidArgumentError, match="other content"):
        begin(it, 1, 3, question=b"other")
    it.finish("answer")
    with pytest.raises(InvalidArgumentError, match="other content"):
        begin(it, 1, 3, question=b"other")


def test_a_gap_names_the_known_length_and_a_tail_closes_it() -> None:
    it = session()
    with pytest.raises(FailedPreconditionError) as caught:
        begin(it, 1, 6, 6)
    assert caught.value.known_length == 3
    assert (it.tokens, it.round) == ([1, 2, 3], 0)
    assert begin(it, 1, 6, 4, 5, 6) is Disposition.COMPUTE
    assert it.tokens == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("epoch", [2, 4])
def test_another_epoch_is_refused(epoch: int) -> None:
    it = session()
    with pytest.raises(StaleEpochError):
        begin(it, 1, 3, epoch=epoch)
    assert it.round == 0


def test_a_past_round_is_refused() -> None:
    it = session()
    begin(it, 5, 3)
    with pytest.raises(StaleEpochError, match="is over"):
        begin(it, 4, 3)


def test_the_base_length_is_absolute_and_cuts_the_ledger() -> None:
    it = session(1, 2, 3, 4, 5)
    begin(it, 1, 3)
    assert it.tokens == [1, 2, 3]


def test_a_tail_overwrites_conflicting_tokens() -> None:
    it = session(1, 2, 3, 4, 5)
    begin(it, 1, 4, 9, 8)
    assert it.tokens == [1, 2, 9, 8]


@pytest.mark.parametrize(("base", "tail"), [(0, ()), (1, (1, 2))])
def test_a_ledger_shorter_than_its_tail_is_refused(base: int, tail: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="base_length"):
        begin(session(), 1, base, *tail)


@pytest.mark.parametrize(
    ("tokens", "cached", "agreed"),
    [
        ([1, 2, 3], [], 0),
        ([1, 2, 3], [1], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 2, 3], 2),  # the newest token is fed again
        ([1, 2, 3], [1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4], [1, 9, 3, 4], 1),
        ([1, 2], [7, 2], 0),
        ([1], [1], 0),
    ],
)
def test_entries_agreeing_with_the_ledger_are_kept(tokens: list[int], cached: list[int], agreed: int) -> None:
    it = session(*tokens)
    it.cached = cached
    assert it.agreed_length() == agreed


def test_an_abandoned_round_may_be_asked_again() -> None:
    it = session()
    begin(it, 7, 3)
    it.abandon_round()
    assert begin(it, 7, 3, question=b"another question") is Disposition.COMPUTE


def test_the_round_before_an_abandoned_one_is_answered_again() -> None:
    """A refusal for lack of blocks crossed with the repeated round. The worker answered, went on by
    itself, lacked blocks for that, and then got the round a third time."""
    it = session()
    begin(it, 6, 3)
    it.finish("answer")
    begin(it, 7, 4, 4)
    it.abandon_round()
    assert it.abandoned
    assert begin(it, 6, 3) is Disposition.REPEAT
    assert it.answer == "answer"
    assert it.tokens == [1, 2, 3, 4]
    with pytest.raises(InvalidArgumentError):
        begin(it, 6, 3, question=b"another question")
    assert begin(it, 7, 4) is Disposition.COMPUTE
    assert not it.abandoned


def test_different_rounds_are_different_questions() -> None:
    chain = Proposal((1, 2))
    sparse = SparseDistribution(b"\0\0\0\0", b"\0\0\x80?")
    questions = [
        question_of(3),
        question_of(4),
        question_of(3, chain),
        question_of(3, Proposal((1, 3))),
        question_of(3, Proposal((1, 2), (-1, -1))),
        question_of(3, Proposal((1, 2), distributions=(sparse, sparse))),
        question_of(3, num_draft_tokens=2),
        question_of(3, num_draft_tokens=3),
        question_of(3, num_draft_tokens=3, shape=TreeShape(2, 5)),
        question_of(3, num_draft_tokens=3, shape=TreeShape(2, 6)),
    ]
    assert len(set(questions)) == len(questions)
    assert question_of(3, chain) == question_of(3, Proposal((1, 2)))
