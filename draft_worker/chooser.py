"""Draft tokens from the logits of a pass, with what each may be and what else it could have been."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from struct import Struct
from typing import Final

import torch

from draft_worker.drafting import Drafting
from draft_worker.fanout import MAX_RANK
from draft_worker.propose import Drawn, propose
from draft_worker.structure import restrictions_of, steps_under
from paceline.core.config import DraftConfig
from paceline.engine.multi_step import Chain
from paceline.engine.scheduling.mask import restricted
from paceline.engine.scheduling.passes import broken_rows

_FLOAT: Final = Struct("<f")


class Chooser:
    """Draws for trunks and branches alike."""

    def __init__(self, config: DraftConfig, eos_token_ids: Sequence[int]) -> None:
        self._config = config
        self._eos_token_ids = eos_token_ids
        self.num_others = MAX_RANK if config.lookahead_branches else 0
        """Other tokens that each drawn one is told with: what branches may begin with."""

    def draw(self, draftings: Sequence[Drafting], logits: torch.Tensor) -> list[Drawn | None]:
        """The next token of each, None where the logits are no distribution."""
        steps, allowed = [d.step for d in draftings], logits
        restrictions = restrictions_of(draftings, self._eos_token_ids)
        if restrictions is not None:
            steps = steps_under(steps, restrictions)
            allowed = restricted(logits, restrictions, [1] * len(steps))
        drawn = propose(
            steps,
            allowed,
            self._config.support_mass,
            self._config.support_bound,
            self._eos_token_ids,
            self.num_others,
        )
        broken = broken_rows(logits)
        return [
            token if not bad and _could_be_drawn(token) else None
            for token, bad in zip(drawn, broken, strict=True)
        ]


def _could_be_drawn(token: Drawn) -> bool:
    """False where the model rules out all that the request permits: then there was nothing to draw from."""
    q = token.distribution
    # They may be in the order of ids, and the first one's less than float32 can say.
    return q is None or any(p > 0 for (p,) in _FLOAT.iter_unpack(q.probabilities))


def drawn_by(chain: Chain) -> Iterable[Drawn]:
    """What a chain drew."""
    told = chain.distributions or repeat(None), chain.others or repeat(()), chain.margins or repeat(0.0)
    return map(Drawn, chain.token_ids, *told)
