"""A worker's self-description: its name, role, protocol version, and compatibility of draft and target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, TokenizerMismatchError
from paceline.rpc.codec import PROTOCOL_VERSION
from paceline.v1 import common_pb2


def model_or_drafter(info: common_pb2.WorkerInfo) -> str:
    """What the worker computes with: its model, or its drafter without one."""
    return info.drafter or info.model


def check_role(info: common_pb2.WorkerInfo, role: str, address: str) -> None:
    """Raise unless the worker at `address` has this role and this protocol version.

    InvalidArgumentError names the setting of the address; FailedPreconditionError has both versions.
    """
    if info.role != role:
        raise InvalidArgumentError(f"{role}s", f"{address} is a {info.role} worker")
    if info.protocol_version != PROTOCOL_VERSION:
        raise FailedPreconditionError(
            f"the worker has protocol version {info.protocol_version}, this coordinator {PROTOCOL_VERSION}"
        )


def check_single(info: common_pb2.WorkerInfo, connected: Mapping[str, str]) -> None:
    """Raise FailedPreconditionError if the worker is `connected` already: its capacity would count twice.

    `connected` has the address of each connected worker by its instance id.
    """
    if info.instance_id and info.instance_id in connected:
        raise FailedPreconditionError(
            f"it is the worker at {connected[info.instance_id]}, which is connected already"
        )


def check_same_model(known: common_pb2.WorkerInfo, other: common_pb2.WorkerInfo) -> None:
    """Raise FailedPreconditionError, with both values, unless both targets compute the same.

    A sequence may move from one to the other. A worker that does not tell its weights is believed.
    """
    if not (known.model_fingerprint and other.model_fingerprint):
        return
    for name in ("model_fingerprint", "dtype"):
        ours, theirs = getattr(known, name), getattr(other, name)
        if ours != theirs:
            raise FailedPreconditionError(
                f"{name} is {theirs} for {other.model}, {ours} for {known.model}, which other targets serve"
            )


def check_target(
    info: common_pb2.WorkerInfo, others: Iterable[common_pb2.WorkerInfo], tokenizer: str, fingerprint: str
) -> None:
    """Raise unless a target serves what the `others` do, with the coordinator's tokenizer.

    FailedPreconditionError and TokenizerMismatchError have both values. `tokenizer` is the name of the
    coordinator's, `fingerprint` that of its vocabulary.
    """
    for other in others:
        check_same_model(other, info)
    if info.tokenizer_fingerprint != fingerprint:
        raise TokenizerMismatchError(
            "tokenizer",
            f"tokenizer_fingerprint of the target {info.model} is {info.tokenizer_fingerprint}, "
            f"of {tokenizer} {fingerprint}",
        )


def check_compatible(target: common_pb2.WorkerInfo, draft: common_pb2.WorkerInfo) -> None:
    """Raise TokenizerMismatchError, with both values, unless both share a tokenizer.

    Padded embeddings do not matter, because both report their tokenizer's ids.
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
                f"{name} is {of_draft} for draft {draft.model}, {of_target} for target {target.model}",
            )
