"""What prompts add to the rounds that wait for their passes, and what those would take without. Pure.

While a prompt is read, a few rows of it are in every pass of the target: a round takes longer, whatever is
decoded in it. To leave such rounds out of what is measured would not do: where prompts are long there are
no others, and the fewer rows a round has itself, the more of its pass they are. So what plain decoding takes
would be known of passes without prompts, and what drafting takes of passes with them.

What a row adds is found by each round and the one before of its kind (same load, same draft tokens): they
differ by the rows of prompts that they waited for, and by chance. What kinds take, and that it drifts, drops
out of that; so nothing need be known of rounds without prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.costs import STRAY

LEAST = 4
"""Rows by which two rounds must differ to tell anything."""
EVIDENCE = 2048.0
"""Squared differences in rows from which on what a row adds is believed: eight of sixteen rows."""
KEPT = 0.99
"""Share that what is known keeps of its say when another difference comes."""
LEFT = 0.25
"""Share of a time that must be left without what prompts added: of less it says too little."""

Kind = tuple[int, int]
"""A load, and draft tokens a sequence."""


@dataclass(slots=True)
class PromptRows:
    """Of a target."""

    _squares: float = 0.0
    _products: float = 0.0
    """Sums over differences: of squared rows, and of rows times seconds (least squares through nothing)."""
    _before: dict[Kind, tuple[int, float]] = field(default_factory=dict)
    """Of the last round of each kind: rows of prompts that it waited for, and seconds."""

    def observe(self, kind: Kind, rows: int, seconds: float) -> None:
        """A round waited so long, and for so many rows of prompts."""
        before = self._before.get(kind)
        self._before[kind] = rows, seconds
        if before is None or abs(rows - before[0]) < LEAST:
            return
        # One stall says no more than that.
        most = STRAY * min(seconds, before[1])
        more, longer = rows - before[0], min(max(seconds - before[1], -most), most)
        self._squares = KEPT * self._squares + more * more
        self._products = KEPT * self._products + more * longer

    @property
    def row(self) -> float | None:
        """Seconds that each adds; None while that is not known."""
        return max(0.0, self._products / self._squares) if self._squares >= EVIDENCE else None

    def without(self, rows: int, seconds: float) -> float | None:
        """What a round would have taken without so many; None where that cannot be told."""
        if not rows:
            return seconds
        row = self.row
        if row is None:
            return None
        left = seconds - row * rows
        return left if left >= LEFT * seconds else None
