"""A sequence's trees and number of drafts, from the settings of its request and of the server."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.sequence.round_record import DRAFT
from coordinator.speculation.arms import AUTO_WIDTH
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import CHAIN, SequenceParams, SpeculationParams, TreeShape
from paceline.core.validation import AUTO, DraftTokens, TreeWidth


@dataclass(frozen=True, slots=True)
class TreeSetting:
    """The settings that hold for one sequence. Width 1 is a chain; `auto` leaves the choice to the policy."""

    width: TreeWidth
    nodes: int
    drafts: int

    @property
    def shape(self) -> TreeShape:
        """Bounds of every round's tree; a chain if the policy chooses."""
        return CHAIN if self.width in (1, AUTO) else TreeShape(int(self.width), self.nodes)

    @property
    def chosen_within(self) -> TreeShape:
        """Bounds of the trees among which the policy chooses."""
        return TreeShape(AUTO_WIDTH, self.nodes) if self.width == AUTO else self.shape


def tree_setting(
    asked: SpeculationParams, config: CoordinatorConfig, k: DraftTokens, params: SequenceParams
) -> TreeSetting:
    """Combine the settings of a request and the server. `k` is the request's K, or the server's.

    Where there can only be chains of one draft, the server's settings give way.

    Raises InvalidArgumentError naming a setting of the request that cannot be followed.
    """
    why = _why_only_chains(asked, k, params)
    for name in ("tree_width", "drafts_per_sequence") if why else ():
        if getattr(asked, name) not in (None, 1, AUTO):
            raise InvalidArgumentError(name, f"must be 1 {why}")
    width, drafts = (
        1 if why else getattr(asked, name) or getattr(config, name)
        for name in ("tree_width", "drafts_per_sequence")
    )
    if asked.max_tree_nodes is not None and (width, drafts) == (1, 1):
        why = why or "where tree_width and drafts_per_sequence are 1"
        raise InvalidArgumentError("max_tree_nodes", f"bounds nothing {why}")
    return TreeSetting(width, asked.max_tree_nodes or config.max_tree_nodes, drafts)


def _why_only_chains(asked: SpeculationParams, k: DraftTokens, params: SequenceParams) -> str:
    """The end of a sentence; empty where trees are possible."""
    if k == 0:
        return "with num_speculative_tokens 0"
    if asked.drafter not in (None, DRAFT):
        return f"with drafter {asked.drafter!r}, which proposes chains"
    if params.judged_as.facts.whole_chain:
        return f"with acceptance {params.mode.value}, which takes no trees"
    return ""
