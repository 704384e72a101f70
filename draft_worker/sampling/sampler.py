"""Draws the next token of several drafts at once, under their grammars; broken rows draw nothing."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import torch

from draft_worker.sampling.children import rank_children
from draft_worker.sampling.draw import Drawn, DrawStep, draw_tokens
from draft_worker.sampling.growth import Row
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.restrictions import restricted_steps, restrictions_of
from paceline.core.config import DraftConfig
from paceline.engine.scheduling.mask import restricted

_FLOAT: Final = Struct("<f")


class TokenSampler:
    """Draws for trunks and branches alike."""

    def __init__(self, config: DraftConfig, eos_token_ids: Sequence[int], num_others: int) -> None:
        """`num_others`: other tokens to rank with each drawn one; branches may begin with them."""
        self._config = config
        self._eos_token_ids = eos_token_ids
        self.num_others = num_others

    def draw(self, drafts: Sequence[PartialDraft], logits: torch.Tensor) -> list[Drawn | None]:
        """The next token of each draft; None where the logits are no distribution.

        logits: float [len(drafts), vocabulary].
        """
        steps, allowed = self._restricted(drafts, logits)
        drawn = draw_tokens(
            steps,
            logits,
            allowed,
            self._config.support_mass,
            self._config.support_bound,
            self._eos_token_ids,
            self.num_others,
        )
        return [token if token is not None and _has_mass(token) else None for token in drawn]

    def children(self, drafts: Sequence[PartialDraft], logits: torch.Tensor, width: int) -> list[Row | None]:
        """The best `width` tokens after each path, best first; None where the logits permit none.

        Arguments as for `draw`; the target decides every token of these drafts.
        """
        steps, allowed = self._restricted(drafts, logits)
        return rank_children(steps, logits, allowed, width, self._eos_token_ids)

    def _restricted(
        self, drafts: Sequence[PartialDraft], logits: torch.Tensor
    ) -> tuple[list[DrawStep], torch.Tensor]:
        """The steps, and the logits without what grammars forbid."""
        steps = [draft.step for draft in drafts]
        restrictions = restrictions_of(drafts, self._eos_token_ids)
        if restrictions is None:
            return steps, logits
        return restricted_steps(steps, restrictions), restricted(logits, restrictions, [1] * len(steps))


def _has_mass(token: Drawn) -> bool:
    """False where the model gives no probability to any token that the request permits."""
    q = token.distribution
    # Probabilities may be in the order of ids, and the first one may be too small for float32.
    return q is None or q.uniform_over > 0 or any(p > 0 for (p,) in _FLOAT.iter_unpack(q.probabilities))
