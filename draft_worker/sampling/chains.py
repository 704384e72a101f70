"""Drafts whose remaining tokens the drafter can draw by itself, with no Python between the steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from draft_worker.sampling.draw import Drawn, draws_alone
from draft_worker.sampling.partial_draft import PartialDraft
from paceline.core.config import DraftConfig
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills, SparseDraws


def can_chain(draft: PartialDraft, skills: ChainSkills | None, eos_token_ids: Sequence[int]) -> bool:
    """True when a drafter with these skills can draw all remaining tokens of the draft."""
    return skills is not None and draft.grammar is None and draws_alone(draft.params, eos_token_ids)


def chain_of(
    draft: PartialDraft, end: Any, feed: Sequence[int], config: DraftConfig, num_others: int
) -> ChainInput:
    """The chain that completes a draft for which `can_chain` is true.

    `end` is the drafter's state of the sequence or of the branch; `feed` ends with the draft's newest token.
    """
    begun, tape, sampling = len(draft.drawn), draft.tape, draft.params.sampling
    noise = None if tape.coupled is None else tape.coupled.after(begun)
    draws = None
    if tape.uniforms is not None:
        uniforms_left = tape.uniforms[begun : draft.k].numpy()
        draws = SparseDraws(uniforms_left, config.support_mass, config.support_bound)
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return ChainInput(end, feed, draft.k - begun, temperature, noise, draws, num_others)


def drawn_by(chain: Chain) -> Iterable[Drawn]:
    """The tokens of a chain."""
    details = chain.distributions or repeat(None), chain.others or repeat(()), chain.margins or repeat(0.0)
    return map(Drawn, chain.token_ids, *details)
