"""Frames of commands and events round-trip, and a bad command fails only its sequence."""

from __future__ import annotations

import pytest

from paceline.core import limits
from paceline.core.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PacelineError,
)
from paceline.core.messages import (
    CloseSequence,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import (
    AcceptanceMode,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    Timings,
    Verdict,
)
from paceline.rpc.streams import frames
from paceline.v1 import draft_pb2, target_pb2

PARAMS = SequenceParams(SamplingParams(seed=2**64 - 1, temperature=0.5), AcceptanceMode.BLOCK, 2)
SPARSE = SparseDistribution(b"\1\0\0\0", b"\0\0\x80?")
OPEN = OpenSequence("s", 2, (1, 2, 3), PARAMS)
CLOSE = CloseSequence("s", 2)
VERIFY = VerifyRound("s", 2, 7, 3, (2, 3), Proposal((4,), distributions=(SPARSE,)))
DRAFT = DraftRound("s", 2, 7, 3, (2, 3), 4)


def test_commands_survive_the_wire_in_order() -> None:
    commands = [OPEN, VERIFY, CLOSE, VERIFY]
    frame = target_pb2.VerifyRequest.FromString(frames.verify_request(commands).SerializeToString())
    assert frames.target_commands(frame) == commands
    drafts = [OPEN, DRAFT, CLOSE, DRAFT]
    request = draft_pb2.DraftRequest.FromString(frames.draft_request(drafts).SerializeToString())
    assert frames.draft_commands(request) == drafts


def same(error: PacelineError, other: PacelineError) -> bool:
    return type(error) is type(other) and str(error) == str(other)


def test_events_survive_the_wire_in_order() -> None:
    verdict = RoundVerdict("s", 2, 7, Verdict(1, (4, 5), 4, Timings(0.5, 0.25, 9, 3)))
    failure = SequenceFailed("t", 1, 3, FailedPreconditionError("gap", known_length=17))
    frame = frames.verify_response([verdict, failure])
    first, second = frames.target_events(target_pb2.VerifyResponse.FromString(frame.SerializeToString()))
    assert first == verdict
    assert isinstance(second, SequenceFailed)
    assert (second.sequence_id, second.epoch, second.round) == ("t", 1, 3)
    assert same(second.error, failure.error)
    assert isinstance(second.error, FailedPreconditionError)
    assert second.error.known_length == 17

    proposal = DraftProposal("s", 2, 7, 3, Proposal((4, 5), distributions=(SPARSE, SPARSE)), 4, Timings(0.5))
    internal = SequenceFailed("t", 1, 3, InternalError("the draft model's logits are not numbers"))
    response = frames.draft_response([internal, proposal])
    first_event, second_event = frames.draft_events(
        draft_pb2.DraftResponse.FromString(response.SerializeToString())
    )
    assert second_event == proposal
    assert isinstance(first_event, SequenceFailed)
    assert same(first_event.error, internal.error)


def test_an_unparsable_command_fails_only_its_sequence() -> None:
    frame = frames.verify_request([OPEN, VERIFY, VERIFY, OPEN])
    frame.commands[0].open_sequence.params.sampling.temperature = -1
    frame.commands[0].open_sequence.sequence_id = "bad params"
    frame.commands[1].verify_round.proposal.parents.append(5)
    frame.commands[1].verify_round.sequence_id = "bad proposal"
    bad_open, bad_round, *good = frames.target_commands(frame)
    assert good == [VERIFY, OPEN]
    assert isinstance(bad_open, SequenceFailed)
    assert (bad_open.sequence_id, bad_open.epoch, bad_open.round) == ("bad params", 2, 0)
    assert isinstance(bad_open.error, InvalidArgumentError)
    assert bad_open.error.field == "temperature"
    assert isinstance(bad_round, SequenceFailed)
    assert (bad_round.sequence_id, bad_round.epoch, bad_round.round) == ("bad proposal", 2, 7)


@pytest.mark.parametrize("k", [0, limits.MAX_SPECULATIVE_TOKENS + 1])
def test_an_invalid_draft_round_fails_only_its_sequence(k: int) -> None:
    frame = frames.draft_request([DRAFT, DRAFT])
    frame.commands[0].draft_round.num_draft_tokens = k
    bad, good = frames.draft_commands(frame)
    assert good == DRAFT
    assert isinstance(bad, SequenceFailed)
    assert bad.round == 7
    assert isinstance(bad.error, InvalidArgumentError)


def test_a_sequence_without_a_seed_is_refused() -> None:
    frame = frames.draft_request([OPEN])
    frame.commands[0].open_sequence.params.sampling.ClearField("seed")
    (bad,) = frames.draft_commands(frame)
    assert isinstance(bad, SequenceFailed)


def test_an_unparsable_answer_fails_only_its_sequence() -> None:
    verdict = RoundVerdict("s", 2, 7, Verdict(1, (4, 5), 4))
    frame = frames.verify_response([verdict, verdict])
    frame.events[0].verdict.num_accepted = 2
    bad, good = frames.target_events(frame)
    assert good == verdict
    assert isinstance(bad, SequenceFailed)
    assert (bad.sequence_id, bad.epoch, bad.round) == ("s", 2, 7)

    proposal = DraftProposal("s", 2, 7, 3, Proposal((4,)), 4)
    response = frames.draft_response([proposal, proposal])
    response.events[0].proposal.proposal.parents.append(5)
    bad_event, good_event = frames.draft_events(response)
    assert good_event == proposal
    assert isinstance(bad_event, SequenceFailed)
    assert bad_event.round == 7


def test_a_command_of_unknown_kind_fails_the_frame() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown to this version"):
        frames.target_commands(target_pb2.VerifyRequest(commands=[target_pb2.TargetCommand()]))
    with pytest.raises(InvalidArgumentError, match="unknown to this version"):
        frames.draft_commands(draft_pb2.DraftRequest(commands=[draft_pb2.DraftCommand()]))


def test_a_frame_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COMMANDS_PER_FRAME", 2)
    with pytest.raises(InvalidArgumentError, match="at most 2"):
        frames.target_commands(frames.verify_request([CLOSE] * 3))
    with pytest.raises(InvalidArgumentError, match="at most 2"):
        frames.draft_commands(frames.draft_request([CLOSE] * 3))
