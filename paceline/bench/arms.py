"""The ways of decoding that a run compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.config import BenchConfig
from paceline.core.validation import AUTO, DraftTokens


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding. Fields other than the name apply to Paceline; a peer has only a name."""

    name: str
    k: DraftTokens | None = None
    lookahead: bool = False
    prompt_lookup: bool = False
    tree_width: int | None = None
    max_tree_nodes: int | None = None
    """With `tree_width`: most draft tokens of a round. None, both, for chains."""

    @property
    def is_peer(self) -> bool:
        """True for another system."""
        return self.k is None


PLAIN = Arm("plain", 0)
"""K = 0 in the same service."""
AGAIN = Arm("plain, again", 0, lookahead=True)
"""K = 0 in another coordinator: its ratio to PLAIN shows the noise of the run."""


def drafting(k: DraftTokens, *, lookahead: bool) -> Arm:
    """K draft tokens in every round, with or without drafting ahead of the verdict."""
    return Arm(f"{'lookahead' if lookahead else 'speculative'}, K={k}", k, lookahead)


def fixed(config: BenchConfig) -> list[Arm]:
    """Every fixed K to compare automatic K with, plain decoding first."""
    return [PLAIN, *(drafting(k, lookahead=config.drafts_ahead) for k in config.k)]


def trees(config: BenchConfig) -> list[Arm]:
    """Trees of each number of nodes, as deep as the first K, with default lookahead."""
    k, width = config.k[0], config.tree_width
    return [
        Arm(f"tree of {nodes}, K={k}", k, config.drafts_ahead, tree_width=width, max_tree_nodes=nodes)
        for nodes in config.max_tree_nodes
    ]


def automatic(config: BenchConfig) -> Arm:
    """Automatic K, with default lookahead and without prompt lookup."""
    return drafting(AUTO, lookahead=config.drafts_ahead)


def served(config: BenchConfig) -> Arm:
    """The service with default settings: automatic K with prompt lookup."""
    return Arm("as served", AUTO, config.drafts_ahead, prompt_lookup=True)


def paceline_arms(config: BenchConfig, concurrency: int) -> list[Arm]:
    """Paceline's arms in the order of a ring.

    At concurrency 1, each K runs without and with lookahead. At higher concurrency, plain decoding runs at
    two opposite points of the ring, so that every arm is close to one of them.
    """
    others = [*trees(config), automatic(config), served(config)]
    if concurrency == 1:
        return [PLAIN, *(drafting(k, lookahead=ahead) for k in config.k for ahead in (False, True)), *others]
    ring = [*fixed(config), *others]
    half = (len(ring) + 1) // 2
    return [*ring[:half], AGAIN, *ring[half:]]


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms rotated by `by`, so that each workload starts with a different arm."""
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]
