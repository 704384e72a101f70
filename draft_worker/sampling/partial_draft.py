"""A draft while its tokens are drawn one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.sampling.draw import Drawn, DrawStep, NoiseTape
from paceline.core.types import SequenceParams
from paceline.grammar import GrammarState


@dataclass(slots=True, eq=False)
class PartialDraft:
    """The first of `k` draft tokens, on a sequence's trunk or on a branch."""

    params: SequenceParams
    ledger: Sequence[int]
    """The tokens it follows; on a branch, the ledger that the branch foresees."""
    k: int
    tape: NoiseTape
    drawn: list[Drawn] = field(default_factory=list)
    grammar: GrammarState | None = None
    """The sequence's grammar state; None where any token may come."""

    @property
    def token_ids(self) -> list[int]:
        """The draft tokens so far."""
        return [d.token_id for d in self.drawn]

    @property
    def newest(self) -> int:
        """The token to feed next."""
        return self.drawn[-1].token_id if self.drawn else self.ledger[-1]

    @property
    def complete(self) -> bool:
        """True when all `k` tokens are drawn."""
        return len(self.drawn) == self.k

    @property
    def step(self) -> DrawStep:
        """What the draw of the next token depends on."""
        return DrawStep(self.params, self.ledger, self.token_ids, self.tape)
