"""Transforms of logits by sampling parameters ("standardised sampling", Leviathan et al. 2023, 2.2).

The order is: repetition, presence and frequency penalties, logit_bias, the masks of min_tokens, bad_words
and allowed_token_ids, temperature, min_p, top_k, top_p. The semantics are those of transformers (repetition,
bad_words, temperature, min_p, top_k, top_p) and vLLM (presence, frequency, min_tokens, allowed_token_ids).
Draft and target apply the same steps.

Unused steps cost nothing; the others touch only the rows that use them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.decoding.rows.row_context import RowContext, ledger_counts
from paceline.decoding.rows.row_params import Allowed, MinP, Penalties, RowParams, TopFilters
from paceline.decoding.transfer import to_device

__all__ = [
    "RowContext",
    "RowParams",
    "ledger_counts",
    "processed_logits",
    "scores_of",
]


def processed_logits(logits: Tensor, row_params: RowParams, context: RowContext | None = None) -> Tensor:
    """Apply the steps that can change an argmax: penalties, logit_bias and masks.

    Args:
        logits: float [R, V].
        row_params: parameters of the R rows.
        context: required if `row_params.needs_context`.

    Returns:
        float32 [R, V]; the input itself if it is float32 and no row uses these steps.

    Raises:
        InvalidArgumentError: a parameter names a token outside the vocabulary.
    """
    values = logits.float()
    if not row_params.changes_logits:
        return values
    if row_params.needs_context and context is None:
        raise ValueError("penalties, min_tokens and bad words need a context")
    if values is logits:
        values = values.clone()
    if row_params.penalties is not None and context is not None and context.counts is not None:
        rows = row_params.penalties.rows
        values[rows] = _penalise(values[rows], row_params.penalties, context.counts)
    if (bias := row_params.bias) is not None:
        _check_token("logit_bias", bias.largest_token, values.shape[1])
        values[bias.rows, bias.tokens] += bias.values
    if (mask := row_params.min_tokens) is not None and context is not None:
        _check_token("stop_token_ids", mask.largest_token, values.shape[1])
        too_early = to_device(context.num_generated, values.device)[mask.rows] < mask.at_least
        where = (mask.rows, mask.tokens)
        values[where] = values[where].masked_fill(too_early, -torch.inf)
    if (words := row_params.bad_words) is not None and context is not None:
        assert context.completes_bad_word is not None
        _check_token("bad_words", words.largest_token, values.shape[1])
        rows, tokens = context.completes_bad_word
        values[to_device(rows, values.device), to_device(tokens, values.device)] = -torch.inf
    if (forbidden := row_params.forbidden) is not None:
        _check_token("bad_words", forbidden.largest_token, values.shape[1])
        values[forbidden.rows, forbidden.tokens] = -torch.inf
    if (allowed := row_params.allowed) is not None:
        _check_token("allowed_token_ids", allowed.largest_token, values.shape[1])
        for own, masked in zip(allowed.rows, _not_allowed(allowed, values.shape[1]), strict=True):
            values[own].masked_fill_(masked, -torch.inf)
    return values


def _not_allowed(allowed: Allowed, vocab_size: int) -> Tensor:
    """bool [S, V]: tokens that each sequence must not take."""
    mask = torch.ones(len(allowed.rows), vocab_size, dtype=torch.bool, device=allowed.tokens.device)
    # A given output size avoids waiting for the device.
    sequences = torch.repeat_interleave(allowed.counts, output_size=len(allowed.tokens))
    mask[sequences, allowed.tokens.long()] = False
    return mask


def _check_token(name: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise InvalidArgumentError(name, f"token id {token_id} is outside the vocabulary of {vocab_size}")


def _penalise(values: Tensor, penalties: Penalties, counts: Tensor) -> Tensor:
    everywhere, generated = counts[:, 0], counts[:, 1]
    repeated = torch.where(values < 0, values * penalties.repetition, values / penalties.repetition)
    values = torch.where(everywhere > 0, repeated, values)
    return values - penalties.frequency * generated - penalties.presence * (generated > 0)


def scores_of(logits: Tensor, row_params: RowParams, context: RowContext | None = None) -> Tensor:
    """Scores whose softmax is each row's sampling distribution.

    A greedy row takes the argmax, the lowest id among equals; temperature and filters do not change it.

    Args:
        logits: float [R, V].
        row_params: parameters of the R rows.
        context: required if `row_params.needs_context`.

    Returns:
        float32 [R, V], -inf for filtered tokens; the input itself if it is float32 and no row uses any step.

    Raises:
        InvalidArgumentError: as `processed_logits`.
    """
    values = processed_logits(logits, row_params, context)
    if row_params.temperature is not None:
        values = values / row_params.temperature
    if row_params.min_p is not None:
        rows = row_params.min_p.rows
        values = values.index_copy(0, rows, _filter_min_p(values[rows], row_params.min_p))
    if row_params.top is not None:
        rows = row_params.top.rows
        values = values.index_copy(0, rows, _filter_top(values[rows], row_params.top))
    return values


def _filter_min_p(values: Tensor, filters: MinP) -> Tensor:
    """Drop tokens less likely than min_p times the most likely one."""
    probabilities = values.softmax(-1)
    floor = filters.min_p * probabilities.amax(-1, keepdim=True)
    return values.masked_fill(probabilities < floor, -torch.inf)


def _filter_top(values: Tensor, filters: TopFilters) -> Tensor:
    """Keep the top_k values (and those equal to the last), then the fewest of them that reach top_p."""
    vocab_size = values.shape[1]
    last = (filters.top_k - 1).clamp(max=vocab_size - 1)
    if not filters.any_top_p:
        top = values.topk(min(filters.largest_top_k, vocab_size), dim=-1).values
        return values.masked_fill(values < top.gather(1, last), -torch.inf)
    ordered = _descending(values)
    below = ordered < ordered.gather(1, last)
    probabilities = ordered.masked_fill(below, -torch.inf).softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    kept = (~below & (before < filters.top_p)).sum(-1, keepdim=True).clamp_(min=1)
    cut = ordered.gather(1, kept - 1)
    # Of the values equal to the last one kept, the lowest ids stay.
    equal = values == cut
    spare = kept - (values > cut).sum(-1, keepdim=True)
    return values.masked_fill((values < cut) | (equal & (equal.cumsum(-1) > spare)), -torch.inf)


def _descending(values: Tensor) -> Tensor:
    """Each row in descending order. On a CPU, numpy's sort is six times as fast as torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values
