"""The draft under structured outputs: it draws from what the grammar allows, as the target will.

Each sequence's state is shared by its trunk and its branches and is moved to the path of whoever asks. A
draft whose grammar gives up draws freely: the target decides, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from draft_worker.drafting import Drafting
from draft_worker.propose import Step
from paceline.core.errors import PacelineError
from paceline.engine.scheduling.mask import Restriction, restriction

log = logging.getLogger(__name__)


def restrictions_of(
    draftings: Sequence[Drafting], eos_token_ids: Sequence[int]
) -> list[Restriction | None] | None:
    """What the next draft token of each may be; None when none of them has a grammar."""
    if all(drafting.grammar is None for drafting in draftings):
        return None
    return [_restriction(drafting, eos_token_ids) for drafting in draftings]


def _restriction(drafting: Drafting, eos_token_ids: Sequence[int]) -> Restriction | None:
    if drafting.grammar is None:
        return None
    params, ledger, drafts, _ = drafting.step
    try:
        return restriction(drafting.grammar, params, ledger, drafts, eos_token_ids, last_only=True)
    except PacelineError as error:
        log.debug("a draft goes on without its grammar: %s", type(error).__name__)
        return None


def steps_under(steps: Sequence[Step], restrictions: Sequence[Restriction | None]) -> list[Step]:
    """The steps with the parameters to sample with."""
    return [
        step if item is None else (item.params, *step[1:])
        for step, item in zip(steps, restrictions, strict=True)
    ]
