"""Structured outputs in the draft: tokens are drawn from what the grammar allows, as the target's are.

The grammar state of a sequence is shared by its trunk and its branches; each use moves it to the path asked
about. If the grammar gives up, the draft draws freely: the target decides, and reports the error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from draft_worker.sampling.draw import DrawStep
from draft_worker.sampling.partial_draft import PartialDraft
from paceline.core.errors import PacelineError
from paceline.engine.scheduling.mask import Restriction, restriction

log = logging.getLogger(__name__)


def restrictions_of(
    drafts: Sequence[PartialDraft], eos_token_ids: Sequence[int]
) -> list[Restriction | None] | None:
    """What the next token of each draft may be; None when none of them has a grammar."""
    if all(draft.grammar is None for draft in drafts):
        return None
    return [_restriction(draft, eos_token_ids) for draft in drafts]


def _restriction(draft: PartialDraft, eos_token_ids: Sequence[int]) -> Restriction | None:
    if draft.grammar is None:
        return None
    before = draft.params, draft.ledger, draft.token_ids
    try:
        return restriction(draft.grammar, *before, eos_token_ids, last_only=True)
    except PacelineError as error:
        log.debug("a draft goes on without its grammar: %s", type(error).__name__)
        return None


def restricted_steps(steps: Sequence[DrawStep], restrictions: Sequence[Restriction | None]) -> list[DrawStep]:
    """The steps, with the sampling parameters of their restrictions."""
    return [
        step if item is None else replace(step, params=item.params)
        for step, item in zip(steps, restrictions, strict=True)
    ]
