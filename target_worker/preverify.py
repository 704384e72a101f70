"""Computes the first row of the next verification while a sequence waits for its draft tokens.

Of the K + 1 rows of a verification, the first one depends on the ledger alone: it says what follows, and so
whether the first draft token is right. While no command waits, the target computes it ("pre-verify"
of PEARL, Liu et al. 2024). A verification then has a row less; where the target's own choice decides, and the
first draft token is another, there is nothing left to compute.

Nobody waits for it: if a command arrives before the halfway point, the pass is cancelled. It does not begin
at once either, since what the draft drew ahead of the verdict may be about to arrive.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.clock import Clock
from paceline.core.errors import ResourceExhaustedError
from paceline.core.types import Verdict
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import SequenceInput
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.telemetry.worker import Passes
from target_worker.acceptance.items import VerifyItem
from target_worker.rounds import NO_PROPOSAL, PrecomputedRow, ends
from target_worker.runner import TargetRunner
from target_worker.verify import verify_items

log = logging.getLogger(__name__)

PAUSE: Final = 0.0003
"""Seconds between a verdict and this pass: a proposal drafted ahead arrives sooner, any other one later."""


@dataclass(slots=True)
class PrecomputedRows:
    """The sequences that wait for their next round, and the rows that are known."""

    runner: TargetRunner
    sequences: HeldSequences[Verdict]
    eos_token_ids: Sequence[int]
    max_model_len: int
    clock: Clock
    passes: Passes
    enabled: bool
    budget: int
    """The most rows of one pass."""
    cancel: CancelToken = field(default_factory=CancelToken)
    """Set by any thread when a command arrives, until all that arrived is handled."""
    _since: dict[str, float] = field(default_factory=dict)
    """When the verdict was sent, for sequences whose row is still to be computed."""
    _rows: dict[str, PrecomputedRow] = field(default_factory=dict)
    """Valid as long as the cache has an entry for each token of the ledger."""

    @property
    def has_work(self) -> bool:
        """True while a sequence waits without its row."""
        return bool(self._since)

    def batching_delay(self) -> float:
        """Seconds until the next row is to be computed."""
        return max(0.0, min(self._since.values()) + PAUSE - self.clock())

    def expect(self, held: HeldSequence[Verdict]) -> None:
        """A verdict is sent, and the sequence's next round is not here."""
        session = held.session
        over = ends(session.params, session.tokens[-1], self.eos_token_ids)
        # A grammar's masks are computed for a whole round.
        if not self.enabled or not self.runner.cancellable or over or held.grammar is not None:
            return
        if len(session.tokens) <= self.max_model_len:
            self._since[session.sequence_id] = self.clock()

    def gone(self, sequence_id: str) -> None:
        """The sequence ended."""
        self._since.pop(sequence_id, None)
        self._rows.pop(sequence_id, None)

    def take(self, held: HeldSequence[Verdict]) -> PrecomputedRow | None:
        """The row after the ledger of a sequence whose round begins; None if it is not known."""
        session = held.session
        row = self._rows.get(session.sequence_id)
        self.gone(session.sequence_id)
        # The sequence may have been preempted since, or lost its newest tokens.
        return row if session.cached == session.tokens else None

    def compute(self) -> None:
        """Run one pass over the sequences that have waited longest; a command cancels it."""
        names = list(itertools.islice(self._since, self.budget))
        waiting = map(self.sequences.find, names)
        # Every token but the newest has an entry, unless the sequence was preempted.
        held = [h for h in waiting if h is not None and h.table.length == len(h.session.tokens) - 1]
        try:
            cancelled = bool(held) and not self._computed(held)
        except ResourceExhaustedError:
            cancelled = False
        except Exception:
            log.exception("the first rows of %d sequences failed; their rounds compute them", len(held))
            cancelled = False
        if not cancelled:
            for name in names:
                del self._since[name]

    def _computed(self, held: Sequence[HeldSequence[Verdict]]) -> bool:
        """False where the pass was cancelled."""
        begun = self.clock()
        inputs = [SequenceInput(item.table, item.session.tokens[-1:], 1) for item in held]
        logits = self.runner.forward_cancellable(inputs, self.cancel)
        if logits is None:
            return False
        self.passes.ran(len(held), len(held), self.clock() - begun)
        for item in held:
            item.fed(item.session.tokens[-1:])
        # The outcome without draft tokens is settled now too, while there is time.
        items = [VerifyItem(item.session.params, item.session.tokens, NO_PROPOSAL) for item in held]
        outcomes = verify_items(items, logits, logits, self.eos_token_ids)
        for i, (item, outcome) in enumerate(zip(held, outcomes, strict=True)):
            row = logits[i : i + 1]
            # A view would keep the logits of the whole pass for as long as this row waits.
            known = PrecomputedRow(row.clone() if len(held) > 1 else row, outcome)
            self._rows[item.session.sequence_id] = known
        return True
