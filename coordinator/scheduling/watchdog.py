"""Decides when a silent draft worker counts as hung. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATIENCE = 2
"""Missed deadlines in a row after which a draft that answered nobody counts as hung. One is not enough: a
draft that reads a long prompt for its only sequence is silent, too."""


@dataclass(slots=True)
class Silence:
    """How long one draft worker has been silent."""

    since: float = -math.inf
    """When the worker was last heard from, or when the last counted deadline passed."""
    deadlines: int = 0
    """Deadlines missed in a row since the worker was heard from or its link started over."""
    hang_ups: int = 0
    """How often its link was started over because of silence."""

    def is_too_long(self, sent_at: float, deadline: float) -> bool:
        """A round that was sent at `sent_at` got no proposal by `deadline`. True if the link must start over.

        Rounds that wait at the same time count once. Starting over may discard the work that kept the draft
        silent, so each time it is given twice as long, until it is heard from.
        """
        if sent_at < self.since:
            return False
        self.since, self.deadlines = deadline, self.deadlines + 1
        if self.deadlines < PATIENCE << self.hang_ups:
            return False
        self.deadlines, self.hang_ups = 0, self.hang_ups + 1
        return True
