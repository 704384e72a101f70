"""Conversion between protobuf messages and core types, with all validation of received messages.

This file has the messages between coordinator and workers. Clients' messages are in generation.py, sampling
parameters and common checks in sampling.py; their names are re-exported here.
"""

from __future__ import annotations

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import PromptLogprobs
from paceline.core.types import Proposal, SparseDistribution, Timings, TokenLogprobs, Verdict
from paceline.rpc.codec.generation import (
    GenerateCall,
    check_against_model,
    finish_reason_from_proto,
    finish_reason_to_proto,
    generate_request_from_proto,
    generate_request_to_proto,
    origin_from_proto,
    origin_to_proto,
    speculation_from_proto,
    speculation_to_proto,
)
from paceline.rpc.codec.resume import Resumption, cancel_request_from_proto, resumption_to_proto
from paceline.rpc.codec.sampling import (
    UNLIMITED_MAX_TOKENS,
    check_choices_remain,
    check_count,
    check_named_tokens,
    check_opening,
    check_text,
    check_token_ids,
    check_wire_ids,
    mode_from_proto,
    mode_to_proto,
    refuse_unknown_fields,
    sampling_from_proto,
    sampling_to_proto,
    sequence_params_from_proto,
    sequence_params_to_proto,
)
from paceline.v1 import common_pb2, draft_pb2, target_pb2

__all__ = [
    "PROTOCOL_VERSION",
    "UNLIMITED_MAX_TOKENS",
    "GenerateCall",
    "Resumption",
    "cancel_request_from_proto",
    "check_against_model",
    "check_choices_remain",
    "check_count",
    "check_named_tokens",
    "check_opening",
    "check_text",
    "check_token_ids",
    "check_wire_ids",
    "draft_proposal_to_proto",
    "finish_reason_from_proto",
    "finish_reason_to_proto",
    "generate_request_from_proto",
    "generate_request_to_proto",
    "mode_from_proto",
    "mode_to_proto",
    "origin_from_proto",
    "origin_to_proto",
    "prompt_logprobs_from_proto",
    "prompt_logprobs_to_proto",
    "proposal_from_proto",
    "proposal_to_proto",
    "refuse_unknown_fields",
    "resumption_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "sequence_params_from_proto",
    "sequence_params_to_proto",
    "speculation_from_proto",
    "speculation_to_proto",
    "timings_from_proto",
    "timings_to_proto",
    "verdict_from_proto",
    "verdict_to_proto",
]

PROTOCOL_VERSION = 1


def proposal_to_proto(proposal: Proposal) -> common_pb2.Proposal:
    """Distributions are forwarded as bytes, without conversion."""
    return common_pb2.Proposal(
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        distributions=[
            common_pb2.SparseDistribution(
                token_ids=d.token_ids, probabilities=d.probabilities, uniform_over=d.uniform_over
            )
            for d in proposal.distributions
        ],
        tries=proposal.tries,
    )


def proposal_from_proto(message: common_pb2.Proposal) -> Proposal:
    """Convert a proposal and check its shape. Raises InvalidArgumentError naming the part.

    The target worker checks ids against the vocabulary, and probabilities, when it builds tensors.
    """
    most = limits.MAX_TREE_NODES if message.parents else limits.MAX_SPECULATIVE_TOKENS
    check_count("proposal.token_ids", message.token_ids, most)
    check_count("proposal.tries", message.tries, limits.MAX_TREE_NODES)
    if len(message.parents) not in (0, len(message.token_ids)):
        raise InvalidArgumentError("proposal.parents", "must be empty or have one entry per node")
    if len(message.distributions) not in (0, len(message.tries) or len(message.token_ids)):
        raise InvalidArgumentError("proposal.distributions", "must be empty or have one entry per try")
    refuse_unknown_fields(message, "proposal")
    token_ids, parents, tries = tuple(message.token_ids), tuple(message.parents), tuple(message.tries)
    _check_tree(token_ids, parents, tries)
    distributions = tuple(_sparse_from_proto(d) for d in message.distributions)
    return Proposal(token_ids, parents, distributions, tries)


def _check_tree(token_ids: tuple[int, ...], parents: tuple[int, ...], tries: tuple[int, ...]) -> None:
    if any(not -1 <= parent < index for index, parent in enumerate(parents)):
        raise InvalidArgumentError("proposal.parents", "must be in topological order")
    if len(set(zip(parents, token_ids, strict=False))) != len(parents):
        raise InvalidArgumentError("proposal.token_ids", "name one child of a node twice")
    if tries and set(tries) != set(range(len(token_ids))):
        raise InvalidArgumentError("proposal.tries", "must name nodes of the proposal, and each of them")


def _sparse_from_proto(message: common_pb2.SparseDistribution) -> SparseDistribution:
    refuse_unknown_fields(message, "proposal.distributions")
    size = len(message.token_ids)
    if message.uniform_over:
        if size or message.probabilities:
            raise InvalidArgumentError("proposal.distributions", "must be empty with uniform_over")
        return SparseDistribution(uniform_over=message.uniform_over)
    if size != len(message.probabilities) or size % 4 or not 0 < size // 4 <= limits.MAX_SUPPORT:
        raise InvalidArgumentError(
            "proposal.distributions",
            f"must have as many ids as probabilities, between 1 and {limits.MAX_SUPPORT}",
        )
    return SparseDistribution(message.token_ids, message.probabilities)


def _microseconds(seconds: float) -> int:
    return min(max(round(seconds * 1e6), 0), 2**32 - 1)


def timings_to_proto(timings: Timings) -> common_pb2.Timings:
    """Convert seconds to whole microseconds, capped at the wire's 71 minutes."""
    return common_pb2.Timings(
        queue_us=_microseconds(timings.queue),
        compute_us=_microseconds(timings.compute),
        rows=timings.rows,
        sequences=timings.sequences,
        prefill_us=_microseconds(timings.prefill),
        prefill_rows=timings.prefill_rows,
        prefill_rows_before=timings.prefill_rows_before,
        cached_tokens=timings.cached_tokens,
    )


def timings_from_proto(message: common_pb2.Timings) -> Timings:
    """Convert whole microseconds to seconds."""
    return Timings(
        queue=message.queue_us / 1e6,
        compute=message.compute_us / 1e6,
        rows=message.rows,
        sequences=message.sequences,
        prefill=message.prefill_us / 1e6,
        prefill_rows=message.prefill_rows,
        prefill_rows_before=message.prefill_rows_before,
        cached_tokens=message.cached_tokens,
    )


def verdict_to_proto(sequence_id: str, epoch: int, round_number: int, verdict: Verdict) -> target_pb2.Verdict:
    """A verdict with the ids of its round."""
    return target_pb2.Verdict(
        sequence_id=sequence_id,
        epoch=epoch,
        round=round_number,
        num_accepted=verdict.num_accepted,
        token_ids=verdict.token_ids,
        num_computed_tokens=verdict.num_computed_tokens,
        timings=timings_to_proto(verdict.timings),
        logprobs=[_logprobs_to_proto(entry) for entry in verdict.logprobs],
        went_on_with=verdict.went_on_with,
        forced_token_ids=verdict.forced_token_ids,
        accepted_nodes=verdict.accepted_nodes,
    )


def verdict_from_proto(message: target_pb2.Verdict) -> Verdict:
    """Raises InvalidArgumentError if counts and tokens are inconsistent."""
    if len(message.token_ids) != message.num_accepted + 1:
        raise InvalidArgumentError("verdict.token_ids", "must be the accepted tokens and the next one")
    check_count("verdict.token_ids", message.token_ids, limits.MAX_SPECULATIVE_TOKENS + 1)
    check_count("verdict.forced_token_ids", message.forced_token_ids, limits.MAX_SPECULATIVE_TOKENS)
    check_count("verdict.logprobs", message.logprobs, len(message.token_ids))
    if len(message.accepted_nodes) not in (0, message.num_accepted):
        raise InvalidArgumentError("verdict.accepted_nodes", "must be empty or the accepted tokens' nodes")
    logprobs = tuple(_logprobs_from_proto(entry) for entry in message.logprobs)
    if logprobs and [entry.token_id for entry in logprobs] != list(message.token_ids):
        raise InvalidArgumentError("verdict.logprobs", "must be empty or have one entry per token")
    return Verdict(
        num_accepted=message.num_accepted,
        token_ids=tuple(message.token_ids),
        num_computed_tokens=message.num_computed_tokens,
        timings=timings_from_proto(message.timings),
        logprobs=logprobs,
        went_on_with=message.went_on_with if message.HasField("went_on_with") else None,
        forced_token_ids=tuple(message.forced_token_ids),
        accepted_nodes=tuple(message.accepted_nodes),
    )


def _logprobs_to_proto(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InvalidArgumentError("logprobs", "must have as many ids as log-probabilities")
    check_count("logprobs", message.top_token_ids, limits.MAX_LOGPROBS)
    return TokenLogprobs(
        message.token_id,
        message.logprob,
        message.rank,
        tuple(message.top_token_ids),
        tuple(message.top_logprobs),
    )


def prompt_logprobs_to_proto(event: PromptLogprobs) -> target_pb2.PromptLogprobs:
    """A part of a prompt's log-probabilities with the ids of its round."""
    return target_pb2.PromptLogprobs(
        sequence_id=event.sequence_id,
        epoch=event.epoch,
        round=event.round,
        start=event.start,
        logprobs=[_logprobs_to_proto(entry) for entry in event.logprobs],
    )


def prompt_logprobs_from_proto(message: target_pb2.PromptLogprobs) -> PromptLogprobs:
    """Raises InvalidArgumentError."""
    check_count("prompt_logprobs", message.logprobs, limits.MAX_PROMPT_LOGPROBS)
    return PromptLogprobs(
        message.sequence_id,
        message.epoch,
        message.round,
        message.start,
        tuple(_logprobs_from_proto(entry) for entry in message.logprobs),
    )


def draft_proposal_to_proto(
    sequence_id: str,
    epoch: int,
    round_number: int,
    base_length: int,
    proposal: Proposal,
    num_computed_tokens: int,
    timings: Timings,
) -> draft_pb2.DraftProposal:
    """A proposal with the ids of its round."""
    return draft_pb2.DraftProposal(
        sequence_id=sequence_id,
        epoch=epoch,
        round=round_number,
        base_length=base_length,
        proposal=proposal_to_proto(proposal),
        num_computed_tokens=num_computed_tokens,
        timings=timings_to_proto(timings),
    )
