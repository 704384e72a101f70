"""Structured outputs in a worker: what the rows of a pass may be, put into their logits.

The mask goes in front of all other transforms. Each of those before the temperature works on one token's
logit alone and leaves minus infinity as it is, so the place is the same as that of the other masks, and
everything behind it (temperature, filters, renormalising, acceptance) sees only what the grammar allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import FIELD
from paceline.core.types import SequenceParams
from paceline.engine.loading.model import LoadedModel
from paceline.grammar import Grammars, GrammarState, Mask


@dataclass(frozen=True, slots=True)
class Restriction:
    """What the rows of one sequence may be."""

    allowed: Mask
    params: SequenceParams
    """Those to sample with: `min_tokens` gives way where the grammar leaves nothing but an end."""
    end: int | None = None
    """How many draft tokens the grammar was followed to, where it was not followed behind them all; at
    least 1. The rows behind them allow everything: a verdict may not go further than the last of these."""


def tokenizer_of(loaded: LoadedModel) -> str | None:
    """The content of a model's tokenizer.json; None if it has none."""
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())


def grammars_of(loaded: LoadedModel) -> Grammars:
    """The grammars of a model's tokenizer."""
    return Grammars(tokenizer_of(loaded), loaded.vocab_size, loaded.eos_token_ids)


def grammar_for(params: SequenceParams, grammars: Grammars | None) -> GrammarState | None:
    """The state a sequence begins with; None for one whose text may be anything.

    Raises InvalidArgumentError naming the field.
    """
    wanted = params.sampling.structure
    if wanted is None:
        return None
    if grammars is None:
        raise InvalidArgumentError(FIELD, "this worker has no tokenizer")
    return grammars.start(wanted, params.cache_salt)


def restriction(
    state: GrammarState,
    params: SequenceParams,
    ledger: Sequence[int],
    drafts: Sequence[int],
    eos_token_ids: Sequence[int],
    *,
    last_only: bool = False,
    seconds: float = limits.MAX_STRUCTURE_SECONDS,
) -> Restriction:
    """What may come after the ledger and after each draft token that follows it.

    Args:
        state: the sequence's.
        params: the sequence's.
        ledger: its tokens, prompt first.
        drafts: N draft tokens.
        eos_token_ids: the model's.
        last_only: the rows before the last are not wanted.
        seconds: processor time after which the grammar is followed behind no more draft tokens.

    Returns:
        N + 1 rows; one with `last_only`.

    Raises PacelineError: the grammar gave up, with the first of the rows.
    """
    generated = ledger[params.prompt_length :]
    if last_only:
        allowed = state.masks([*generated, *drafts])
        length = len(generated) + len(drafts)
    else:
        allowed = state.masks(generated, drafts, seconds)
        length = len(generated)
    known, end = len(allowed), None
    if not last_only and known <= len(drafts):
        end = known
        allowed = np.pad(allowed, ((0, len(drafts) + 1 - known), (0, 0)), constant_values=True)
    return Restriction(allowed, _params_for(params, allowed, length, eos_token_ids), end)


def _params_for(
    params: SequenceParams, allowed: Mask, num_generated: int, eos_token_ids: Sequence[int]
) -> SequenceParams:
    """Without `min_tokens` from the first row on where only ends are left; the text is finished there."""
    sampling = params.sampling
    if num_generated >= sampling.min_tokens:
        return params
    others = allowed.copy()
    others[:, [*eos_token_ids, *sampling.stop_token_ids]] = False
    finished = ~others.any(axis=1)
    if not finished.any():
        return params
    least = min(sampling.min_tokens, num_generated + int(finished.argmax()))
    return replace(params, sampling=replace(sampling, min_tokens=least))


def restricted(logits: Tensor, restrictions: Sequence[Restriction | None], rows: Sequence[int]) -> Tensor:
    """Logits in which what a grammar forbids is minus infinity.

    Args:
        logits: float [sum of `rows`, V].
        restrictions: one a sequence, None where anything may come.
        rows: consecutive rows of each sequence.

    Returns:
        The same shape; the input itself when no sequence is restricted.
    """
    result, start = logits, 0
    for item, count in zip(restrictions, rows, strict=True):
        if item is not None:
            if result is logits:
                result = logits.clone()
            forbidden = torch.from_numpy(~item.allowed).to(logits.device)
            result[start : start + count].masked_fill_(forbidden, -torch.inf)
        start += count
    return result
