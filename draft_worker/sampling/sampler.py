"""Draws the next token of several drafts at once, under their grammars; broken rows draw nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_worker.sampling.children import rank_children, supports_of
from draft_worker.sampling.draw import Drawn, DrawStep, draw_tokens, has_mass
from draft_worker.sampling.growth import Row
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.restrictions import restricted_steps, restrictions_of
from paceline.core.config import DraftConfig
from paceline.decoding.transfer import rows_at
from paceline.engine.scheduling.mask import restricted


class TokenSampler:
    """Draws for trunks and branches alike."""

    def __init__(self, config: DraftConfig, eos_token_ids: Sequence[int], num_others: int) -> None:
        """`num_others`: other tokens to rank with each drawn one, for what is drafted ahead."""
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
        return [token if token is None or _drawable(token) else None for token in drawn]

    def rows(self, drafts: Sequence[PartialDraft], logits: torch.Tensor, width: int) -> Sequence[Row | None]:
        """What may follow each path of a tree; None where the logits permit no token.

        Arguments as for `draw`. Where the target decides, the rows are the best `width` tokens,
        and the other ones that are ranked for outcomes to draft ahead for.
        """
        steps, allowed = self._restricted(drafts, logits)
        config, eos, rows = self._config, self._eos_token_ids, dict[int, Row | None]()
        by_ratio = [i for i, step in enumerate(steps) if step.tape.uniforms is not None]
        ranked = [i for i, step in enumerate(steps) if step.tape.uniforms is None]

        def part(some: Sequence[int]) -> tuple[list[DrawStep], torch.Tensor, torch.Tensor]:
            if len(some) == len(steps):
                return steps, logits, allowed
            return [steps[i] for i in some], rows_at(logits, some), rows_at(allowed, some)

        if ranked:
            rows |= zip(ranked, rank_children(*part(ranked), width + self.num_others, eos), strict=True)
        if by_ratio:
            found = supports_of(*part(by_ratio), config.support_mass, config.support_bound, eos)
            rows |= zip(by_ratio, found, strict=True)
        return [rows[i] for i in range(len(steps))]

    def _restricted(
        self, drafts: Sequence[PartialDraft], logits: torch.Tensor
    ) -> tuple[list[DrawStep], torch.Tensor]:
        """The steps, and the logits without what grammars forbid."""
        steps = [draft.step for draft in drafts]
        restrictions = restrictions_of(drafts, self._eos_token_ids)
        if restrictions is None:
            return steps, logits
        return restricted_steps(steps, restrictions), restricted(logits, restrictions, [1] * len(steps))


def _drawable(token: Drawn) -> bool:
    return token.distribution is None or has_mass(token.distribution)
