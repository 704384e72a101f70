"""Acceptance modes: how the target decides on draft tokens, and what other processes must know of each."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFacts:
    """What holds of a mode above temperature 0; the rule itself is in target_worker/acceptance."""

    needs_q: bool
    """A proposal carries the distribution that each draft token was drawn from, unless it was not drawn."""
    lossless: bool
    """The target's distribution is left unchanged."""
    shares_noise: bool
    """Draft and target choose with the same noise, so every token is the target's own choice: a seed's tokens
    depend neither on the draft nor on how tokens are cut into rounds."""
    takes_trees: bool
    """The rule judges proposals that are trees."""
    whole_chain: bool
    """Whether a draft token is accepted depends on those after it too, not only on those before it."""


class AcceptanceMode(enum.Enum):
    """How the target decides on draft tokens."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def facts(self) -> AcceptanceFacts:
        """What holds of this mode."""
        return FACTS[self]


FACTS: Final[dict[AcceptanceMode, AcceptanceFacts]] = {
    AcceptanceMode.COUPLED: AcceptanceFacts(
        needs_q=False, lossless=True, shares_noise=True, takes_trees=False, whole_chain=False
    ),
    AcceptanceMode.REJECTION: AcceptanceFacts(
        needs_q=True, lossless=True, shares_noise=False, takes_trees=False, whole_chain=False
    ),
    AcceptanceMode.BLOCK: AcceptanceFacts(
        needs_q=True, lossless=True, shares_noise=False, takes_trees=False, whole_chain=True
    ),
}

GREEDY_MODE: Final = AcceptanceMode.COUPLED
"""Whose rule judges every request at temperature 0: the target's choice is then its argmax, without noise."""
