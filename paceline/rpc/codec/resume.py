"""Where a client goes on with a request it had begun, between protobuf and values."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.codec.sampling import check_wire_ids, refuse_unknown_fields
from paceline.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Resumption:
    """How many tokens of each choice the client has; `received` are these tokens, or empty."""

    resume_from: tuple[int, ...]
    received: tuple[tuple[int, ...], ...] = ()

    @property
    def begins(self) -> bool:
        """True when the client has nothing yet, so that there is nothing to go on from."""
        return not any(self.resume_from)


def cancel_request_from_proto(message: generation_pb2.CancelRequest) -> str:
    """The id of the request to end. Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(message, "request")
    if not message.request_id:
        raise InvalidArgumentError("request_id", "is required")
    return message.request_id


def resumption_to_proto(resumption: Resumption | None, message: generation_pb2.GenerateRequest) -> None:
    """Write it into the request. Raises InvalidArgumentError for ids that the wire cannot carry."""
    if resumption is None:
        return
    message.resume_from.extend(resumption.resume_from)
    for token_ids in resumption.received:
        check_wire_ids("received", token_ids)
        message.received.add(ids=token_ids)


def resumption_from_proto(message: generation_pb2.GenerateRequest, choices: int) -> Resumption | None:
    """None where the request begins. Raises InvalidArgumentError naming the field."""
    if message.resumable and not message.request_id:
        raise InvalidArgumentError("request_id", "is required of a request that may be resumed")
    if not message.resume_from:
        if message.received:
            raise InvalidArgumentError("received", "goes with resume_from only")
        return None
    if not message.request_id:
        raise InvalidArgumentError("request_id", "is required to resume a request")
    if len(message.resume_from) != choices:
        raise InvalidArgumentError("resume_from", f"needs one index each choice, of which n is {choices}")
    resume_from = tuple(message.resume_from)
    if max(resume_from) > limits.MAX_TOKENS:
        raise InvalidArgumentError("resume_from", f"must be in [0, {limits.MAX_TOKENS}]")
    if len(message.received) not in (0, choices):
        raise InvalidArgumentError("received", f"needs one list each choice, of which n is {choices}")
    for sequence, count in zip(message.received, resume_from, strict=False):
        refuse_unknown_fields(sequence, "received")
        if len(sequence.ids) != count:
            raise InvalidArgumentError("received", "needs as many tokens of each choice as resume_from says")
    if message.received and sum(resume_from) > limits.MAX_RECEIVED_TOKENS:
        most = limits.MAX_RECEIVED_TOKENS
        raise InvalidArgumentError("received", f"at most {most} tokens of all choices together")
    return Resumption(resume_from, tuple(tuple(sequence.ids) for sequence in message.received))
