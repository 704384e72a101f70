"""The worker protocol spoken by hand: repeats, gaps, epochs, bad rounds, and what they leave behind."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.refusals import ends_with
from harness.stacks import RunningStack
from harness.waiting import HANG, until
from harness.wire import Line, next_round, params

from paceline.core import limits
from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, StaleEpochError
from paceline.core.messages import (
    CloseSequence,
    DraftProposal,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import Proposal, SparseDistribution
from paceline.rpc.streams import frames
from paceline.v1 import target_pb2

ROLES = ("target", "draft")


@pytest.fixture
def line(stack: RunningStack, request: pytest.FixtureRequest) -> Iterator[Line]:
    """A stream to the worker the test is parametrised with; it leaves nothing behind."""
    role = getattr(request, "param", "target")
    with Line(stack.stack.address_of(role), role) as opened:
        before = opened.info().cache.sequences
        assert before == 0
        yield opened
    with Line(stack.stack.address_of(role), role) as other:
        until(lambda: other.used_blocks() == 0, "free blocks after the stream's end")
        assert other.info().cache.sequences == 0


both = pytest.mark.parametrize("line", ROLES, indirect=True)


@pytest.fixture(scope="module")
def tokens(oracle: Oracle) -> Ids:
    return oracle.encode(SOURCE)[:40]


def is_answer(event: Any) -> bool:
    return isinstance(event, RoundVerdict | DraftProposal)


# ---- repeats, gaps, epochs ---------------------------------------------------------------------------


@both
def test_a_repeated_round_gets_the_stored_answer(line: Line, tokens: Ids) -> None:
    """Also where it is repeated while it is computed: then it is answered once."""
    sequence = line.open(tokens)
    command = next_round(sequence)
    line.send(command, command, command)
    first = line.receive()
    assert is_answer(first)
    # Equal to the last microsecond: nothing was computed again.
    assert line.ask(command) == first
    # The tail may differ, the question is the same.
    assert line.ask(next_round(sequence, round=1, committed_tail=tokens[-3:])) == first


@both
def test_the_same_round_with_other_content_is_refused(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens)
    command = next_round(sequence)
    answer = line.ask(command)
    other = sequence.verify([5, 6, 8], round=1) if line.role == "target" else sequence.draft(4, round=1)
    assert line.refused(other).field == "round"
    assert line.ask(command) == answer, "the refusal must not change what is stored"


@both
def test_an_older_round_is_refused(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens)
    old = next_round(sequence)
    line.ask(old)
    line.ask(next_round(sequence, tail=0))
    assert isinstance(line.refused(old), StaleEpochError)


@both
def test_a_gap_is_answered_with_the_known_length(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens[:20])
    sequence.ledger = list(tokens)
    error = line.refused(next_round(sequence, tail=5))
    assert isinstance(error, FailedPreconditionError)
    assert error.known_length == 20
    # Resent from there it is answered, as by a worker that had it all from the start.
    answer = line.ask(next_round(sequence, round=1, tail=len(tokens) - error.known_length))
    assert is_answer(answer)
    fresh = line.open(tokens)
    expected = line.ask(next_round(fresh))
    assert result_of(answer) == result_of(expected)


def result_of(event: Any) -> tuple[Ids, int]:
    if isinstance(event, RoundVerdict):
        return event.verdict.token_ids, event.verdict.num_computed_tokens
    return event.proposal.token_ids, event.num_computed_tokens


@both
def test_an_older_epoch_is_refused(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens, epoch=3)
    stale = next_round(sequence, epoch=2)
    assert isinstance(line.refused(stale), StaleEpochError)
    reopened = OpenSequence(sequence.id, 2, tuple(tokens), params(len(tokens)))
    assert isinstance(line.refused(reopened), StaleEpochError)
    line.send(CloseSequence(sequence.id, 2))
    assert is_answer(line.ask(next_round(sequence, round=1))), "an old epoch's close must close nothing"


@both
def test_a_newer_epoch_replaces_the_sequence(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens)
    first = line.ask(next_round(sequence))
    line.send(OpenSequence(sequence.id, 2, tuple(tokens), params(len(tokens))))
    again = line.ask(next_round(sequence, epoch=2, round=1))
    assert result_of(again) == result_of(first)
    assert isinstance(line.refused(next_round(sequence, epoch=1)), StaleEpochError)
    assert line.info().cache.sequences == 1


@both
def test_opening_the_same_epoch_again_changes_nothing(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens)
    command = next_round(sequence)
    first = line.ask(command)
    line.send(OpenSequence(sequence.id, 1, tuple(tokens), params(len(tokens))))
    assert line.ask(command) == first


@both
def test_an_unknown_sequence_is_not_found(line: Line, tokens: Ids) -> None:
    sequence = line.open(tokens)
    assert is_answer(line.ask(next_round(sequence)))
    sequence.end()
    assert isinstance(line.refused(next_round(sequence)), NotFoundError)
    sequence.end()  # closing what is not there is harmless
    assert line.info().cache.sequences == 0


@both
def test_a_bad_command_fails_only_its_sequence(line: Line, tokens: Ids) -> None:
    good, bad = line.open(tokens), line.open(tokens)
    wrong = next_round(bad, base_length=5000)
    events = [line.ask(wrong, next_round(good)), line.receive()]
    failed = [e for e in events if isinstance(e, SequenceFailed)]
    assert [e.sequence_id for e in failed] == [bad.id]
    assert [e.sequence_id for e in events if is_answer(e)] == [good.id]


# ---- rounds that cannot be honoured ------------------------------------------------------------------


def sparse(*entries: tuple[int, float]) -> SparseDistribution:
    ids, probabilities = zip(*entries, strict=True) if entries else ((), ())
    return SparseDistribution(
        struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(probabilities)}f", *probabilities)
    )


NAN, INF = float("nan"), float("inf")

BAD_DISTRIBUTIONS = {
    "empty": sparse(),
    "not a number": sparse((5, NAN), (6, 0.5)),
    "all not numbers": sparse((5, NAN)),
    "infinite": sparse((5, INF)),
    "negative": sparse((5, 1.5), (6, -0.5)),
    "zero": sparse((5, 0.0), (6, 0.0)),
    "the token cannot have been drawn": sparse((6, 1.0)),
    "the token has probability 0": sparse((5, 0.0), (6, 1.0)),
    "an id twice": sparse((5, 0.5), (5, 0.5)),
    "an id outside the vocabulary": sparse((5, 0.5), (4_000_000_000, 0.5)),
    "more probabilities than ids": SparseDistribution(struct.pack("<I", 5), struct.pack("<2f", 0.5, 0.5)),
    "half an id": SparseDistribution(b"\x05\x00", b"\x00\x00"),
    "too many": sparse(*((i, 1.0) for i in range(limits.MAX_SUPPORT + 1))),
    "uniform over more than the vocabulary": SparseDistribution(uniform_over=4_000_000_000),
    "uniform over too few for the token": SparseDistribution(uniform_over=5),
    "uniform and listed": SparseDistribution(struct.pack("<I", 5), struct.pack("<f", 1.0), 6),
}


@pytest.mark.parametrize("name", BAD_DISTRIBUTIONS)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_malformed_distributions_are_refused(line: Line, tokens: Ids, name: str, mode: str) -> None:
    sequence = line.open(tokens, mode=mode, temperature=1.0)
    bystander = line.open(tokens)
    error = line.refused(sequence.verify(Proposal((5,), (), (BAD_DISTRIBUTIONS[name],))))
    assert error.field == "proposal.distributions"
    # The round was not taken up: put without the distribution it is decided, as is everybody else's.
    assert is_answer(line.ask(sequence.verify([], round=1)))
    assert is_answer(line.ask(bystander.verify([5])))


BAD_ROUNDS: dict[str, tuple[str, Callable[[Any, int, int], VerifyRound]]] = {
    "a draft token outside the vocabulary": ("proposal.token_ids", lambda s, v, n: s.verify([v])),
    "a tail outside the vocabulary": (
        "committed_tail",
        lambda s, v, n: s.verify([], committed_tail=(v,), base_length=41),
    ),
    "more draft tokens than the limit": (
        "proposal.token_ids",
        lambda s, v, n: s.verify([5] * (limits.MAX_SPECULATIVE_TOKENS + 1)),
    ),
    "a tree with twins": ("proposal.token_ids", lambda s, v, n: s.verify(Proposal((5, 5), (-1, -1)))),
    "a tree out of order": ("proposal.parents", lambda s, v, n: s.verify(Proposal((5, 6), (1, -1)))),
    "beyond the model's length": (
        "proposal.token_ids",
        lambda s, v, n: s.verify([5], base_length=n, committed_tail=(5,) * (n - 40)),
    ),
    "a tail longer than the ledger": (
        "base_length",
        lambda s, v, n: s.verify([], base_length=3, committed_tail=(5, 6, 7, 8)),
    ),
    "an empty ledger": ("base_length", lambda s, v, n: s.verify([], base_length=0)),
    "distributions in coupled mode": (
        "proposal.distributions",
        lambda s, v, n: s.verify(Proposal((5,), (), (sparse((5, 1.0)),))),
    ),
    "fewer distributions than tokens": (
        "proposal.distributions",
        lambda s, v, n: s.verify(Proposal((5, 6), (), (sparse((5, 1.0)),))),
    ),
}
"""By the field: a round of a sequence, a vocabulary's size and a model's length."""


@pytest.mark.parametrize("name", BAD_ROUNDS)
def test_invalid_rounds_are_refused_by_field(line: Line, tokens: Ids, name: str) -> None:
    info, sequence = line.info(), line.open(tokens)
    field, make = BAD_ROUNDS[name]
    assert line.refused(make(sequence, info.vocabulary_size, info.max_model_len)).field == field
    assert is_answer(line.ask(sequence.verify([], round=1, base_length=len(tokens), committed_tail=())))


@pytest.mark.parametrize("line", ["draft"], indirect=True)
@pytest.mark.parametrize("k", [0, limits.MAX_SPECULATIVE_TOKENS + 1, 2**31])
def test_the_draft_refuses_too_many_draft_tokens(line: Line, tokens: Ids, k: int) -> None:
    sequence = line.open(tokens)
    assert line.refused(sequence.draft(k)).field == "num_draft_tokens"
    assert is_answer(line.ask(sequence.draft(3, round=1)))


@both
def test_the_last_position_of_the_model_is_usable(line: Line, oracle: Oracle) -> None:
    info = line.info()
    ids = oracle.encode(SOURCE)
    prompt = (ids * (info.max_model_len // len(ids) + 1))[: info.max_model_len]
    sequence = line.open(prompt)
    if line.role == "target":
        answer = line.ask(sequence.verify([]))
        assert answer.verdict.num_computed_tokens == info.max_model_len
    else:
        assert isinstance(line.refused(sequence.draft(2)), InvalidArgumentError)
        answer = line.ask(sequence.draft(1, round=1))
        assert answer.num_computed_tokens == info.max_model_len


FAR = 3_000_000_000
"""Outside every vocabulary."""
BAD_OPENINGS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "no tokens": ("token_ids", (), {}),
    "a token outside the vocabulary": ("token_ids", (5, FAR), {}),
    "a bias outside the vocabulary": ("logit_bias", (5, 6), {"logit_bias": {FAR: 1.0}}),
    "a stop token outside": ("stop_token_ids", (5, 6), {"stop_token_ids": (FAR,), "min_tokens": 4}),
    "no seed": ("seed", (5, 6), {"seed": None}),
}


@both
@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_sequence_with_bad_parameters_is_refused(line: Line, tokens: Ids, name: str) -> None:
    """One sequence's bad parameters end that sequence and no other, least of all the worker."""
    field, ledger, sampling = BAD_OPENINGS[name]
    bystander = line.open(tokens)
    sequence = line.open(ledger, **sampling)
    event = line.receive()
    assert isinstance(event, SequenceFailed)
    assert (event.sequence_id, event.error.field) == (sequence.id, field)
    assert isinstance(line.refused(next_round(sequence)), NotFoundError)
    assert is_answer(line.ask(next_round(bystander)))
    assert line.info().cache.sequences == 1


@both
def test_a_prompt_length_beyond_the_ledger_does_no_harm(line: Line, tokens: Ids) -> None:
    """Penalties and min_tokens count from the prompt's end, wherever a coordinator says it is."""
    sampling = {"presence_penalty": 1.0, "min_tokens": 3, "max_tokens": 9}
    sequence = line.open(tokens)
    odd = line.open(tokens)
    line.send(OpenSequence(odd.id, 2, tuple(tokens), params(4_000_000_000, **sampling)))
    line.send(next_round(odd, epoch=2))
    event = line.receive()
    assert isinstance(event, SequenceFailed | RoundVerdict | DraftProposal)
    assert is_answer(line.ask(next_round(sequence)))


BAD_FRAMES = {
    "a command of no kind": target_pb2.VerifyRequest(commands=[target_pb2.TargetCommand()]),
    "too many commands": frames.verify_request(
        [CloseSequence("nobody", 1)] * (limits.MAX_COMMANDS_PER_FRAME + 1)
    ),
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_bad_frame_ends_only_its_stream(stack: RunningStack, tokens: Ids, frame: Any) -> None:
    address = stack.stack.address_of("target")
    with Line(address, "target") as other:
        kept = other.open(tokens)
        assert is_answer(other.ask(kept.verify([5])))
        broken = Line(address, "target")
        broken.open(tokens)
        broken.send_frame(frame)
        with ends_with(grpc.StatusCode.INVALID_ARGUMENT):
            broken.receive()
        broken.close()
        until(lambda: other.info().cache.sequences == 1, "the end of the broken stream's sequences")
        assert is_answer(other.ask(kept.verify([5], tail=0)))


# ---- streams and ownership ---------------------------------------------------------------------------


@both
def test_the_end_of_a_stream_frees_its_blocks(line: Line, stack: RunningStack, tokens: Ids) -> None:
    with Line(stack.stack.address_of(line.role), line.role) as other:
        for i in range(5):
            # What begins alike shares its blocks.
            assert is_answer(other.ask(next_round(other.open((i, *tokens)))))
        assert line.info().cache.sequences == 5
        assert line.used_blocks() >= 5 * (len(tokens) // 16)
    until(lambda: line.info().cache.sequences == 0, "the end of the sequences")
    assert line.used_blocks() == 0


@both
def test_a_stale_stream_takes_nothing_from_the_owner(line: Line, stack: RunningStack, tokens: Ids) -> None:
    """It gets no answers, and its end frees no blocks of the owner."""
    sequence = line.open(tokens, epoch=2)
    assert is_answer(line.ask(next_round(sequence)))
    with Line(stack.stack.address_of(line.role), line.role) as zombie:
        stale = next_round(sequence, epoch=1, tail=0)
        assert isinstance(zombie.refused(stale), StaleEpochError)
        command = next_round(sequence, tail=0)
        line.send(command)
        assert is_answer(line.receive())
    assert line.info().cache.sequences == 1
    assert is_answer(line.ask(next_round(sequence, tail=0)))


@both
def test_a_newer_epoch_moves_the_sequence_to_its_stream(line: Line, stack: RunningStack, tokens: Ids) -> None:
    with Line(stack.stack.address_of(line.role), line.role) as first:
        sequence = first.open(tokens)
        assert is_answer(first.ask(next_round(sequence)))
        line.send(OpenSequence(sequence.id, 2, tuple(tokens), params(len(tokens))))
        assert is_answer(line.ask(next_round(sequence, epoch=2, tail=0)))
    # The former owner's stream is over; the sequence is not.
    assert is_answer(line.ask(next_round(sequence, epoch=2, tail=0)))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_stacks_worker_requires_its_secret(stack: RunningStack, role: str) -> None:
    """Every local user reaches its port."""
    name = f"/paceline.v1.{role.capitalize()}Service/"
    with grpc.insecure_channel(stack.stack.address_of(role)) as channel:
        for method in ("GetWorkerInfo", "Verify" if role == "target" else "Draft"):
            with ends_with(grpc.StatusCode.UNAUTHENTICATED):
                list(channel.unary_stream(name + method)(b"", timeout=HANG))
