"""Acceptance modes and the facts about each that other processes need."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFacts:
    """Properties of a mode above temperature 0; the rule itself is in target_worker/acceptance."""

    needs_q: bool
    """A proposal carries the distribution of each sampled draft token."""
    lossless: bool
    """The output has the target's distribution."""
    shares_noise: bool
    """Draft and target choose with the same noise, so every token is the target's own choice: the tokens of a
    seed depend neither on the draft nor on the division into rounds."""
    takes_trees: bool
    """The rule accepts proposals that are trees."""
    whole_chain: bool
    """Acceptance of a draft token also depends on the tokens after it."""


class AcceptanceMode(enum.Enum):
    """How the target decides on draft tokens."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def facts(self) -> AcceptanceFacts:
        return FACTS[self]


FACTS: Final[dict[AcceptanceMode, AcceptanceFacts]] = {
    AcceptanceMode.COUPLED: AcceptanceFacts(
        needs_q=False, lossless=True, shares_noise=True, takes_trees=True, whole_chain=False
    ),
    AcceptanceMode.REJECTION: AcceptanceFacts(
        needs_q=True, lossless=True, shares_noise=False, takes_trees=True, whole_chain=False
    ),
    AcceptanceMode.BLOCK: AcceptanceFacts(
        needs_q=True, lossless=True, shares_noise=False, takes_trees=False, whole_chain=True
    ),
}

GREEDY_MODE: Final = AcceptanceMode.COUPLED
"""The mode whose rule applies at temperature 0: the target's choice is then its argmax, without noise."""
