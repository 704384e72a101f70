"""Conversion of the worker streams' frames: many commands or events in one message.

An invalid command becomes a `SequenceFailed` for its sequence, and the rest of the frame is handled. So one
sequence's invalid input does not end the stream that all sequences share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftCommand,
    DraftEvent,
    DraftProposal,
    DraftRound,
    OpenSequence,
    PromptLogprobs,
    RoundVerdict,
    SequenceFailed,
    TargetCommand,
    TargetEvent,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import CHAIN, Outcome, Proposal, TreeShape
from paceline.rpc import codec
from paceline.rpc.codec.status import from_status, to_status
from paceline.v1 import common_pb2, draft_pb2, target_pb2


def _close(command: CloseSequence) -> target_pb2.CloseSequence:
    return target_pb2.CloseSequence(sequence_id=command.sequence_id, epoch=command.epoch)


def _failure_to_proto(event: SequenceFailed) -> common_pb2.SequenceError:
    return common_pb2.SequenceError(
        sequence_id=event.sequence_id,
        epoch=event.epoch,
        round=event.round,
        status=to_status(event.error),
        known_length=getattr(event.error, "known_length", 0),
    )


def _failure_from_proto(message: common_pb2.SequenceError) -> SequenceFailed:
    return SequenceFailed(
        message.sequence_id,
        message.epoch,
        message.round,
        from_status(message.status, message.known_length),
    )


def verify_request(commands: Iterable[TargetCommand]) -> target_pb2.VerifyRequest:
    """A frame for the target worker."""
    frame = target_pb2.VerifyRequest()
    for command in commands:
        slot = frame.commands.add()
        match command:
            case OpenSequence():
                slot.open_sequence.CopyFrom(
                    target_pb2.OpenTargetSequence(
                        sequence_id=command.sequence_id,
                        epoch=command.epoch,
                        token_ids=command.token_ids,
                        params=codec.sequence_params_to_proto(command.params),
                    )
                )
            case VerifyRound():
                _fill_verify_round(slot.verify_round, command)
            case VerifyAhead():
                slot.verify_ahead.CopyFrom(
                    target_pb2.VerifyAhead(
                        sequence_id=command.sequence_id,
                        epoch=command.epoch,
                        round=command.round,
                        base_length=command.base_length,
                        continuations=_continuations(command.proposals),
                        plain_otherwise=command.plain_otherwise,
                    )
                )
            case CloseSequence():
                slot.close_sequence.CopyFrom(_close(command))
    return frame


def _fill_verify_round(message: target_pb2.VerifyRound, command: VerifyRound) -> None:
    """Filled field by field, because this message is sent in every round and a copy would double its cost."""
    message.sequence_id = command.sequence_id
    message.epoch = command.epoch
    message.round = command.round
    message.base_length = command.base_length
    message.committed_tail.extend(command.committed_tail)
    message.proposal.token_ids.extend(command.proposal.token_ids)
    message.proposal.parents.extend(command.proposal.parents)
    message.proposal.tries.extend(command.proposal.tries)
    for distribution in command.proposal.distributions:
        message.proposal.distributions.add(
            token_ids=distribution.token_ids,
            probabilities=distribution.probabilities,
            uniform_over=distribution.uniform_over,
        )


def draft_request(commands: Iterable[DraftCommand]) -> draft_pb2.DraftRequest:
    """A frame for the draft worker."""
    frame = draft_pb2.DraftRequest()
    for command in commands:
        slot = frame.commands.add()
        match command:
            case OpenSequence():
                slot.open_sequence.CopyFrom(
                    draft_pb2.OpenDraftSequence(
                        sequence_id=command.sequence_id,
                        epoch=command.epoch,
                        token_ids=command.token_ids,
                        params=codec.sequence_params_to_proto(command.params),
                    )
                )
            case DraftRound():
                slot.draft_round.CopyFrom(
                    draft_pb2.DraftRound(
                        sequence_id=command.sequence_id,
                        epoch=command.epoch,
                        round=command.round,
                        base_length=command.base_length,
                        committed_tail=command.committed_tail,
                        num_draft_tokens=command.num_draft_tokens,
                        num_lookahead_tokens=command.num_lookahead_tokens,
                        proposal_known=command.proposal_known,
                        tree_width=0 if command.shape.is_chain else command.shape.width,
                        max_tree_nodes=0 if command.shape.is_chain else command.shape.nodes,
                        no_lookahead=command.no_lookahead,
                    )
                )
            case CloseSequence():
                slot.close_sequence.CopyFrom(_close(command))
    return frame


def _check_names(commands: Sequence[Any]) -> None:
    """Raises InvalidArgumentError for a name that is too long; answers repeat the name."""
    if any(len(command.sequence_id) > limits.MAX_SEQUENCE_ID_CHARACTERS for command in commands):
        most = limits.MAX_SEQUENCE_ID_CHARACTERS
        raise InvalidArgumentError("sequence_id", f"must have at most {most} characters")


def _check_frame(size: int) -> None:
    if size > limits.MAX_COMMANDS_PER_FRAME:
        raise InvalidArgumentError(
            "commands", f"at most {limits.MAX_COMMANDS_PER_FRAME} in a frame, got {size}"
        )


def target_commands(frame: target_pb2.VerifyRequest) -> list[TargetCommand | SequenceFailed]:
    """The commands of a frame in order. Raises InvalidArgumentError only for an invalid frame."""
    _check_frame(len(frame.commands))
    commands: list[TargetCommand | SequenceFailed] = []
    for slot in frame.commands:
        match slot.WhichOneof("command"):
            case "open_sequence":
                commands.append(_open(slot.open_sequence))
            case "verify_round":
                commands.append(_verify_round(slot.verify_round))
            case "verify_ahead":
                commands.append(_verify_ahead(slot.verify_ahead))
            case "close_sequence":
                commands.append(_closing(slot.close_sequence))
            case _:
                raise InvalidArgumentError("commands", "contains a command unknown to this version")
    _check_names(commands)
    return commands


def draft_commands(frame: draft_pb2.DraftRequest) -> list[DraftCommand | SequenceFailed]:
    """The commands of a frame in order. Raises InvalidArgumentError only for an invalid frame."""
    _check_frame(len(frame.commands))
    commands: list[DraftCommand | SequenceFailed] = []
    for slot in frame.commands:
        match slot.WhichOneof("command"):
            case "open_sequence":
                commands.append(_open(slot.open_sequence))
            case "draft_round":
                commands.append(_draft_round(slot.draft_round))
            case "close_sequence":
                commands.append(_closing(slot.close_sequence))
            case _:
                raise InvalidArgumentError("commands", "contains a command unknown to this version")
    _check_names(commands)
    return commands


def _open(
    message: target_pb2.OpenTargetSequence | draft_pb2.OpenDraftSequence,
) -> OpenSequence | SequenceFailed:
    try:
        codec.check_count("token_ids", message.token_ids, limits.MAX_LEDGER_TOKENS)
        params = codec.sequence_params_from_proto(message.params)
        codec.refuse_unknown_fields(message, "open_sequence")
    except InvalidArgumentError as error:
        return SequenceFailed(message.sequence_id, message.epoch, 0, error)
    return OpenSequence(message.sequence_id, message.epoch, tuple(message.token_ids), params)


def _closing(message: target_pb2.CloseSequence) -> CloseSequence:
    """Unknown fields are accepted here, because a sequence that is not closed would keep its blocks."""
    return CloseSequence(message.sequence_id, message.epoch)


def _verify_round(message: target_pb2.VerifyRound) -> VerifyRound | SequenceFailed:
    try:
        codec.check_count("committed_tail", message.committed_tail, limits.MAX_LEDGER_TOKENS)
        proposal = codec.proposal_from_proto(message.proposal)
        codec.refuse_unknown_fields(message, "verify_round")
    except InvalidArgumentError as error:
        return SequenceFailed(message.sequence_id, message.epoch, message.round, error)
    return VerifyRound(
        message.sequence_id,
        message.epoch,
        message.round,
        message.base_length,
        tuple(message.committed_tail),
        proposal,
    )


def _verify_ahead(message: target_pb2.VerifyAhead) -> VerifyAhead | SequenceFailed:
    try:
        proposals = _proposals_by_outcome(message.continuations)
        codec.refuse_unknown_fields(message, "verify_ahead")
    except InvalidArgumentError as error:
        return SequenceFailed(message.sequence_id, message.epoch, message.round, error)
    where = message.sequence_id, message.epoch, message.round, message.base_length
    return VerifyAhead(*where, proposals, message.plain_otherwise)


def _check_num_draft_tokens(name: str, k: int) -> None:
    if not 1 <= k <= limits.MAX_SPECULATIVE_TOKENS:
        raise InvalidArgumentError(name, f"must be between 1 and {limits.MAX_SPECULATIVE_TOKENS}")


def _shape(message: draft_pb2.DraftRound) -> TreeShape:
    width, nodes = message.tree_width, message.max_tree_nodes
    if width <= 1:
        if nodes:
            raise InvalidArgumentError("max_tree_nodes", "requires tree_width above 1")
        return CHAIN
    if width > limits.MAX_TREE_WIDTH:
        raise InvalidArgumentError("tree_width", f"must be at most {limits.MAX_TREE_WIDTH}")
    if not 1 <= nodes <= limits.MAX_TREE_NODES:
        raise InvalidArgumentError("max_tree_nodes", f"must be between 1 and {limits.MAX_TREE_NODES}")
    return TreeShape(width, nodes)


def _draft_round(message: draft_pb2.DraftRound) -> DraftRound | SequenceFailed:
    try:
        codec.check_count("committed_tail", message.committed_tail, limits.MAX_LEDGER_TOKENS)
        codec.refuse_unknown_fields(message, "draft_round")
        _check_num_draft_tokens("num_draft_tokens", message.num_draft_tokens)
        if message.num_lookahead_tokens:
            _check_num_draft_tokens("num_lookahead_tokens", message.num_lookahead_tokens)
        shape = _shape(message)
    except InvalidArgumentError as error:
        return SequenceFailed(message.sequence_id, message.epoch, message.round, error)
    return DraftRound(
        message.sequence_id,
        message.epoch,
        message.round,
        message.base_length,
        tuple(message.committed_tail),
        message.num_draft_tokens,
        message.num_lookahead_tokens,
        message.proposal_known,
        shape,
        message.no_lookahead,
    )


def verify_response(events: Sequence[TargetEvent]) -> target_pb2.VerifyResponse:
    """A frame from the target worker."""
    frame = target_pb2.VerifyResponse()
    for event in events:
        slot = frame.events.add()
        match event:
            case RoundVerdict():
                slot.verdict.CopyFrom(
                    codec.verdict_to_proto(event.sequence_id, event.epoch, event.round, event.verdict)
                )
            case PromptLogprobs():
                slot.prompt_logprobs.CopyFrom(codec.prompt_logprobs_to_proto(event))
            case SequenceFailed():
                slot.error.CopyFrom(_failure_to_proto(event))
    return frame


def draft_response(events: Sequence[DraftEvent]) -> draft_pb2.DraftResponse:
    """A frame from the draft worker."""
    frame = draft_pb2.DraftResponse()
    for event in events:
        slot = frame.events.add()
        match event:
            case DraftProposal():
                slot.proposal.CopyFrom(
                    codec.draft_proposal_to_proto(
                        event.sequence_id,
                        event.epoch,
                        event.round,
                        event.base_length,
                        event.proposal,
                        event.num_computed_tokens,
                        event.timings,
                    )
                )
            case Continuations():
                slot.continuations.CopyFrom(_continuations_to_proto(event))
            case SequenceFailed():
                slot.error.CopyFrom(_failure_to_proto(event))
    return frame


def _continuations_to_proto(event: Continuations) -> draft_pb2.Continuations:
    return draft_pb2.Continuations(
        sequence_id=event.sequence_id,
        epoch=event.epoch,
        round=event.round,
        base_length=event.base_length,
        continuations=_continuations(event.proposals),
    )


def _continuations(proposals: Mapping[Outcome, Proposal]) -> list[common_pb2.Continuation]:
    return [
        common_pb2.Continuation(
            num_accepted=accepted,
            next_token=token,
            last_node=node,
            proposal=codec.proposal_to_proto(proposal),
        )
        for (accepted, token, node), proposal in proposals.items()
    ]


def _proposals_by_outcome(
    continuations: Sequence[common_pb2.Continuation],
) -> dict[Outcome, Proposal]:
    codec.check_count("continuations", continuations, limits.MAX_CONTINUATIONS)
    proposals: dict[Outcome, Proposal] = {}
    for each in continuations:
        node = each.last_node if each.HasField("last_node") else None
        outcome = Outcome(each.num_accepted, each.next_token, node)
        proposals[outcome] = codec.proposal_from_proto(each.proposal)
        codec.refuse_unknown_fields(each, "continuations")
    return proposals


def target_events(frame: target_pb2.VerifyResponse) -> list[TargetEvent]:
    """The events of a frame; an invalid event becomes a failure of its sequence."""
    events: list[TargetEvent] = []
    for slot in frame.events:
        if slot.HasField("error"):
            events.append(_failure_from_proto(slot.error))
            continue
        message = slot.prompt_logprobs if slot.HasField("prompt_logprobs") else slot.verdict
        address = (message.sequence_id, message.epoch, message.round)
        try:
            if isinstance(message, target_pb2.PromptLogprobs):
                events.append(codec.prompt_logprobs_from_proto(message))
            else:
                events.append(RoundVerdict(*address, codec.verdict_from_proto(message)))
        except InvalidArgumentError as error:
            events.append(SequenceFailed(*address, error))
    return events


def draft_events(frame: draft_pb2.DraftResponse) -> list[DraftEvent]:
    """The events of a frame; an invalid event becomes a failure of its sequence."""
    return [_draft_event(slot) for slot in frame.events]


def _draft_event(slot: draft_pb2.DraftEvent) -> DraftEvent:
    if slot.HasField("error"):
        return _failure_from_proto(slot.error)
    foresees = slot.HasField("continuations")
    if not foresees and not slot.HasField("proposal"):
        return SequenceFailed("", 0, 0, InvalidArgumentError("events", "contains an unknown event"))
    message = slot.continuations if foresees else slot.proposal
    try:
        return _continuations_event(slot.continuations) if foresees else _proposal_event(slot.proposal)
    except InvalidArgumentError as error:
        return SequenceFailed(message.sequence_id, message.epoch, message.round, error)


def _proposal_event(message: draft_pb2.DraftProposal) -> DraftProposal:
    return DraftProposal(
        message.sequence_id,
        message.epoch,
        message.round,
        message.base_length,
        codec.proposal_from_proto(message.proposal),
        message.num_computed_tokens,
        codec.timings_from_proto(message.timings),
    )


def _continuations_event(message: draft_pb2.Continuations) -> Continuations:
    return Continuations(
        message.sequence_id,
        message.epoch,
        message.round,
        message.base_length,
        _proposals_by_outcome(message.continuations),
    )
