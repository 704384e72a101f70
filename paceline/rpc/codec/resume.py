"""Conversion of resumptions between protobuf and values."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.codec.sampling import check_wire_ids, refuse_unknown_fields
from paceline.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Resumption:
    """A resuming client's position: its number of tokens of each choice. `received` has these tokens or is
    empty."""

    resume_from: tuple[int, ...]
    received: tuple[tuple[int, ...], ...] = ()

    @property
    def begins(self) -> bool:
        """True if the client has no tokens yet."""
        return not any(self.resume_from)


def cancel_request_from_proto(message: generation_pb2.CancelRequest) -> str:
    """The id of the request to cancel. Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(message, "request")
    if not message.request_id:
        raise InvalidArgumentError("request_id", "is required")
    return message.request_id


def resumption_to_proto(resumption: Resumption | None, message: generation_pb2.GenerateRequest) -> None:
    """Write the resumption into a request. Raises InvalidArgumentError for ids that the wire cannot carry."""
    if resumption is None:
        return
    message.resume_from.extend(resumption.resume_from)
    for token_ids in resumption.received:
        check_wire_ids("received", token_ids)
        message.received.add(ids=token_ids)


def resumption_from_proto(message: generation_pb2.GenerateRequest, choices: int) -> Resumption | None:
    """None for a new request. Raises InvalidArgumentError naming the field."""
    if message.resumable and not message.request_id:
        raise InvalidArgumentError("request_id", "is required for a resumable request")
    if not message.resume_from:
        if message.received:
            raise InvalidArgumentError("received", "requires resume_from")
        return None
    if not message.request_id:
        raise InvalidArgumentError("request_id", "is required to resume a request")
    if len(message.resume_from) != choices:
        raise InvalidArgumentError("resume_from", f"must have one index per choice (n is {choices})")
    resume_from = tuple(message.resume_from)
    if max(resume_from) > limits.MAX_TOKENS:
        raise InvalidArgumentError("resume_from", f"must be in [0, {limits.MAX_TOKENS}]")
    if len(message.received) not in (0, choices):
        raise InvalidArgumentError("received", f"must have one list per choice (n is {choices})")
    for sequence, count in zip(message.received, resume_from, strict=False):
        refuse_unknown_fields(sequence, "received")
        if len(sequence.ids) != count:
            raise InvalidArgumentError("received", "must have resume_from tokens of each choice")
    if message.received and sum(resume_from) > limits.MAX_RECEIVED_TOKENS:
        most = limits.MAX_RECEIVED_TOKENS
        raise InvalidArgumentError("received", f"at most {most} tokens for all choices together")
    return Resumption(resume_from, tuple(tuple(sequence.ids) for sequence in message.received))
