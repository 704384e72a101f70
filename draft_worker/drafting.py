"""Draft tokens being drawn one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.propose import Drawn, NoiseTape, Step
from paceline.core.messages import DraftRound
from paceline.core.types import SequenceParams
from paceline.engine.scheduling.passes import Job
from paceline.grammar import GrammarState


@dataclass(slots=True, eq=False)
class Drafting:
    """Draft tokens being drawn one by one, on a sequence's trunk or on a branch."""

    params: SequenceParams
    ledger: Sequence[int]
    """What they follow; on a branch it is the ledger that the branch foresees."""
    k: int
    tape: NoiseTape
    drawn: list[Drawn] = field(default_factory=list)
    grammar: GrammarState | None = None
    """The sequence's, which knows what each token may be; None where it may be anything."""

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
        """True when all K tokens are drawn."""
        return len(self.drawn) == self.k

    @property
    def step(self) -> Step:
        """What `propose` needs to draw the next token."""
        return self.params, self.ledger, self.token_ids, self.tape


@dataclass(slots=True)
class Round:
    """A proposal in progress."""

    command: DraftRound
    drafting: Drafting
    job: Job
    """Its outstanding feed."""
