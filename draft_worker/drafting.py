"""Draft tokens being drawn one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.propose import Drawn, NoiseTape, Step
from paceline.core.types import SequenceParams
from paceline.engine.passes import Job


@dataclass(slots=True)
class Drafting:
    """Draft tokens being drawn one by one, on a sequence's trunk or on a branch."""

    job: Job
    base_length: int
    k: int
    tape: NoiseTape
    drawn: list[Drawn] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The draft tokens so far."""
        return [d.token_id for d in self.drawn]

    @property
    def complete(self) -> bool:
        """True when all K tokens are drawn."""
        return len(self.drawn) == self.k

    @property
    def params(self) -> SequenceParams:
        """The request."""
        params: SequenceParams = self.job.held.session.params
        return params

    @property
    def step(self) -> Step:
        """What `propose` needs to draw the next token."""
        ledger: Sequence[int] = self.job.held.session.tokens
        return self.params, ledger, self.token_ids, self.tape

    def take(self, token: Drawn) -> None:
        """Keep a drawn token; feed it next unless it is the last."""
        self.drawn.append(token)
        if not self.complete:
            self.job.feed_next([token.token_id], rows=1)
