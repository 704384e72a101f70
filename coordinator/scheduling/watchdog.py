"""When a draft worker that says nothing is taken to hang. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATIENCE = 2
"""Deadlines in a row after which a draft hangs that said nothing to anybody. One is not enough: to read a
long prompt for one sequence alone is as silent."""


@dataclass(slots=True)
class Silence:
    """Of a draft worker."""

    since: float = -math.inf
    """When it was last heard from, or when the last deadline passed that counts."""
    deadlines: int = 0
    """How many passed in a row since then, or since its link started over."""
    hang_ups: int = 0
    """Times that its link started over for it."""

    def is_too_long(self, sent_at: float, deadline: float) -> bool:
        """A round got no proposal: True where the link is to start over.

        Rounds of many sequences wait at the same time, which counts once. A link that starts over may cost
        the draft what it was busy with, so the next time it has twice as long, until it is heard from.
        """
        if sent_at < self.since:
            return False
        self.since, self.deadlines = deadline, self.deadlines + 1
        if self.deadlines < PATIENCE << self.hang_ups:
            return False
        self.deadlines, self.hang_ups = 0, self.hang_ups + 1
        return True
