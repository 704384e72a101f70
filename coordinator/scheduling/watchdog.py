"""Decides when a silent draft worker counts as hung. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATIENCE = 2
"""A draft worker counts as hung after this many missed deadlines in a row without any answer. One is not
enough, because a draft that prefills a long prompt for its only sequence is silent too."""


@dataclass(slots=True)
class Silence:
    """How long one draft worker has been silent."""

    since: float = -math.inf
    """Time of the worker's last answer, or of the last counted deadline if that is later."""
    deadlines: int = 0
    """Deadlines missed in a row since the worker last answered or its link was restarted."""
    hang_ups: int = 0
    """Number of times the link was restarted since the worker last answered."""

    def is_too_long(self, sent_at: float, deadline: float) -> bool:
        """Record that a round sent at `sent_at` got no proposal by `deadline`. True if the link must restart.

        Rounds that wait at the same time count once. A restart may discard the work that kept the draft
        silent, so each restart doubles the number of deadlines allowed, until the draft answers.
        """
        if sent_at < self.since:
            return False
        self.since, self.deadlines = deadline, self.deadlines + 1
        if self.deadlines < PATIENCE << self.hang_ups:
            return False
        self.deadlines, self.hang_ups = 0, self.hang_ups + 1
        return True
