"""Structured outputs in a worker: masks a pass's logits by the sequences' grammars.

The mask is applied before all other transforms. Transforms before the temperature act on single logits and
leave minus infinity unchanged, so the order among them does not matter. Every later step (temperature,
filters, renormalising, acceptance) sees only the tokens that the grammar allows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.structured import FIELD
from paceline.core.types import SequenceParams
from paceline.decoding.rows.row_params import ends_of
from paceline.decoding.transfer import to_device
from paceline.engine.loading.model import LoadedModel
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.engine.tree_places import TreePlaces
from paceline.grammar import Grammars, GrammarState, Mask
from paceline.grammar.trees import tree_masks


@dataclass(frozen=True, slots=True)
class Restriction:
    """The tokens that the rows of one sequence may have."""

    allowed: Mask
    params: SequenceParams
    """Parameters for sampling: `min_tokens` yields if the grammar allows only an end."""
    unfollowed: Collection[int] = ()
    """Draft tokens behind which the grammar was not followed. Those rows allow every token, so a verdict must
    not go beyond such a token."""


def tokenizer_of(loaded: LoadedModel) -> str | None:
    """The content of a model's tokenizer.json; None if it has none."""
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())


def grammars_of(loaded: LoadedModel) -> Grammars:
    """The grammars of a model's tokenizer."""
    return Grammars(tokenizer_of(loaded), loaded.vocab_size, loaded.eos_token_ids)


def grammar_for(params: SequenceParams, grammars: Grammars | None) -> GrammarState | None:
    """The initial grammar state of a sequence; None without a restriction.

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
    parents: Sequence[int] = (),
    last_only: bool = False,
    seconds: float = limits.MAX_STRUCTURE_SECONDS,
) -> Restriction:
    """The tokens allowed after the ledger and after each draft token that follows it.

    Args:
        state: the sequence's.
        params: the sequence's.
        ledger: its tokens, prompt first.
        drafts: N draft tokens.
        eos_token_ids: the model's.
        parents: of a tree's nodes, an earlier node or -1; none for a chain.
        last_only: compute only the last row.
        seconds: processor time after which the grammar is not followed further.

    Returns:
        N + 1 rows; one with `last_only`.

    Raises PacelineError: the grammar failed at the first row.
    """
    generated = ledger[params.prompt_length :]
    depths: Sequence[int] = range(len(drafts) + 1)
    unfollowed: Collection[int] = ()
    if last_only:
        allowed, depths = state.masks([*generated, *drafts]), depths[-1:]
    elif parents:
        allowed, unfollowed = tree_masks(state, generated, drafts, parents, seconds)
        depths = 0, *TreePlaces.of(parents).depths
    else:
        allowed = state.masks(generated, drafts, seconds)
        known = len(allowed)
        allowed = np.pad(allowed, ((0, len(depths) - known), (0, 0)), constant_values=True)
        unfollowed = range(known - 1, len(drafts))
    lengths = np.array(depths) + len(generated)
    return Restriction(allowed, _params_for(params, allowed, lengths, eos_token_ids), unfollowed)


def forced_tokens(held: HeldSequence[Any]) -> tuple[int, ...]:
    """Tokens that the sequence's grammar leaves no choice about behind its ledger, at most K."""
    if held.grammar is None:
        return ()
    session = held.session
    try:
        tokens = held.grammar.forced(session.tokens[session.params.prompt_length :])
    except PacelineError:
        return ()  # the next round fails with this error
    return tokens[: limits.MAX_SPECULATIVE_TOKENS]


def _params_for(
    params: SequenceParams, allowed: Mask, lengths: npt.NDArray[np.int64], eos_token_ids: Sequence[int]
) -> SequenceParams:
    """The parameters for sampling with these masks: `min_tokens` yields where a grammar allows only ends.

    If it yields in one of the rows, the masks forbid the ends in the others instead.

    Args:
        params: the sequence's.
        allowed: [R, V], changed in place.
        lengths: [R], generated tokens before each row.
        eos_token_ids: the model's.
    """
    sampling = params.sampling
    early = lengths < sampling.min_tokens
    if not early.any():
        return params
    others = allowed.copy()
    others[:, [*eos_token_ids, *sampling.stop_token_ids]] = False
    finished = ~others.any(axis=1)
    if not (early & finished).any():
        return params
    waiting = np.nonzero(early & ~finished)[0]
    allowed[waiting[:, None], ends_of(sampling, eos_token_ids)] = False
    return replace(params, sampling=replace(sampling, min_tokens=0))


def restricted(logits: Tensor, restrictions: Sequence[Restriction | None], rows: Sequence[int]) -> Tensor:
    """Logits with minus infinity for the tokens that a grammar forbids.

    Args:
        logits: float [sum of `rows`, V].
        restrictions: one a sequence, None without a restriction.
        rows: consecutive rows of each sequence.

    Returns:
        The same shape; the input itself if no sequence is restricted.
    """
    starts = np.cumsum([0, *rows])
    masked = [
        (start, item.allowed) for start, item in zip(starts, restrictions, strict=False) if item is not None
    ]
    if not masked:
        return logits
    result = logits.clone()
    forbidden = _forbidden([allowed for _, allowed in masked], logits.device)
    for (start, allowed), own in zip(masked, forbidden, strict=True):
        result[start : start + len(allowed)].masked_fill_(own, -torch.inf)
    return result


def _forbidden(masks: Sequence[Mask], device: torch.device) -> Sequence[Tensor]:
    """What masks do not allow, as tensors on a device, which gets them as bits in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(~mask) for mask in masks]
    packed = np.concatenate([np.packbits(mask, axis=1, bitorder="little") for mask in masks])
    sent = to_device(torch.from_numpy(packed), device)
    bits = sent[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    whole = bits.view(len(packed), -1)[:, : masks[0].shape[1]] == 0
    return torch.split(whole, [len(mask) for mask in masks])
