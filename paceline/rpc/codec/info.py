"""What a worker says of itself: whether it may serve here, and a draft worker beside a target worker."""

from __future__ import annotations

from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, TokenizerMismatchError
from paceline.rpc.codec import PROTOCOL_VERSION
from paceline.v1 import common_pb2


def check_role(info: common_pb2.WorkerInfo, role: str, address: str) -> None:
    """Raise unless the worker at `address` is of this role and speaks our version of the protocol.

    InvalidArgumentError names the setting that the address is of; FailedPreconditionError has both versions.
    """
    if info.role != role:
        raise InvalidArgumentError(f"{role}s", f"{address} is a {info.role} worker")
    if info.protocol_version != PROTOCOL_VERSION:
        raise FailedPreconditionError(
            f"it speaks protocol version {info.protocol_version}, this coordinator {PROTOCOL_VERSION}"
        )


def check_compatible(target: common_pb2.WorkerInfo, draft: common_pb2.WorkerInfo) -> None:
    """Raise TokenizerMismatchError, with both values, unless the two share a tokenizer.

    Padded embeddings do not matter: both sides report the ids their tokenizer knows.
    """
    pairs = (
        ("vocabulary_size", target.vocabulary_size, draft.vocabulary_size),
        ("tokenizer_fingerprint", target.tokenizer_fingerprint, draft.tokenizer_fingerprint),
        ("eos_token_ids", sorted(target.eos_token_ids), sorted(draft.eos_token_ids)),
    )
    for name, of_target, of_draft in pairs:
        if of_target != of_draft:
            raise TokenizerMismatchError(
                "draft_model",
                f"{name} of the draft {draft.model} is {of_draft}, of the target {target.model} {of_target}",
            )
