"""The first row of the next verification, computed while a sequence waits for its draft tokens.

Of K + 1 rows that a verification needs, the first one depends on the ledger alone: it says what follows, and
so whether the first draft token is right. While nobody asks for anything the target computes it ("pre-verify"
of PEARL, Liu et al. 2024). A verification then has a row less; where the target's own choice decides, and the
first draft token is another, there is nothing left to compute.

Nobody waits for it: a pass that is not half done when a command arrives is given up. It does not begin at
once either, for what the draft drew ahead of the verdict may be about to arrive.
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
from target_worker.decide import Case, judge
from target_worker.rounds import NOTHING, FirstRow, ends
from target_worker.runner import Runner

log = logging.getLogger(__name__)

PAUSE: Final = 0.0003
"""Seconds from a verdict to this: what was drawn ahead of it comes sooner, anything else later."""


@dataclass(slots=True)
class FirstRows:
    """Which sequences wait, and what is known of them."""

    runner: Runner
    sequences: HeldSequences[Verdict]
    eos_token_ids: Sequence[int]
    max_model_len: int
    clock: Clock
    passes: Passes
    wanted: bool
    budget: int
    """Rows of one pass."""
    cancel: CancelToken = field(default_factory=CancelToken)
    """Wanted when a command arrives, from any thread, until all that came is taken up."""
    _since: dict[str, float] = field(default_factory=dict)
    """When the verdict was out on those whose row is still to be computed."""
    _rows: dict[str, FirstRow] = field(default_factory=dict)
    """Of the ledger, as long as the cache has an entry for each of its tokens."""

    @property
    def has_work(self) -> bool:
        """True while a sequence waits without its row."""
        return bool(self._since)

    def batching_delay(self) -> float:
        """Seconds until the next one is to be computed."""
        return max(0.0, min(self._since.values()) + PAUSE - self.clock())

    def expect(self, held: HeldSequence[Verdict]) -> None:
        """Its verdict is out, and its next round is not here."""
        session = held.session
        over = ends(session.params, session.tokens[-1], self.eos_token_ids)
        # What a grammar allows is worked out for a whole round.
        if not self.wanted or not self.runner.can_stop or over or held.grammar is not None:
            return
        if len(session.tokens) <= self.max_model_len:
            self._since[session.sequence_id] = self.clock()

    def gone(self, sequence_id: str) -> None:
        """It ended."""
        self._since.pop(sequence_id, None)
        self._rows.pop(sequence_id, None)

    def take(self, held: HeldSequence[Verdict]) -> FirstRow | None:
        """The row after the ledger of a sequence whose round begins; None if it is not known."""
        session = held.session
        row = self._rows.get(session.sequence_id)
        self.gone(session.sequence_id)
        # It may have lost its entries to others since, or its newest tokens.
        return row if session.cached == session.tokens else None

    def compute(self) -> None:
        """One pass over those that wait longest, unless somebody asks for something meanwhile."""
        names = list(itertools.islice(self._since, self.budget))
        waiting = map(self.sequences.find, names)
        # All but the newest token are there, but for those that have lost their entries to others.
        held = [h for h in waiting if h is not None and h.table.length == len(h.session.tokens) - 1]
        try:
            given_up = bool(held) and not self._computed(held)
        except ResourceExhaustedError:
            given_up = False
        except Exception:
            log.exception("the first rows of %d sequences failed; their rounds compute them", len(held))
            given_up = False
        if not given_up:
            for name in names:
                del self._since[name]

    def _computed(self, held: Sequence[HeldSequence[Verdict]]) -> bool:
        """False where the pass was given up."""
        begun = self.clock()
        inputs = [SequenceInput(item.table, item.session.tokens[-1:], 1) for item in held]
        logits = self.runner.forward_unless(inputs, self.cancel)
        if logits is None:
            return False
        self.passes.ran(len(held), len(held), self.clock() - begun)
        for item in held:
            item.fed(item.session.tokens[-1:])
        # What comes of it is settled while there is time, too.
        cases = [Case(item.session.params, item.session.tokens, NOTHING) for item in held]
        verdicts = judge(cases, logits, logits, self.eos_token_ids)
        for i, (item, verdict) in enumerate(zip(held, verdicts, strict=True)):
            row = logits[i : i + 1]
            # A part of the pass's logits would hold all of them for as long as this one waits.
            self._rows[item.session.sequence_id] = FirstRow(row.clone() if len(held) > 1 else row, verdict)
        return True
