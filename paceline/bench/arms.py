"""Which ways of decoding a run compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.config import BenchConfig
from paceline.core.validation import AUTO, DraftTokens


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding. All but the name are Paceline's; a peer has a name only."""

    name: str
    k: DraftTokens | None = None
    lookahead: bool = False
    prompt_lookup: bool = False

    @property
    def is_peer(self) -> bool:
        """True for another system."""
        return self.k is None


PLAIN = Arm("plain", 0)
"""K = 0 through the same service."""
AGAIN = Arm("plain, again", 0, lookahead=True)
"""The same through another coordinator: by so much ratios of this run differ from 1 for no reason."""


def drafting(k: DraftTokens, *, lookahead: bool) -> Arm:
    """K draft tokens in every round; `lookahead` drafts ahead of the verdict."""
    return Arm(f"{'lookahead' if lookahead else 'speculative'}, K={k}", k, lookahead)


def fixed(config: BenchConfig) -> list[Arm]:
    """Every fixed K beside which the service's own choice is seen, plain decoding first."""
    return [PLAIN, *(drafting(k, lookahead=config.drafts_ahead) for k in config.k)]


def automatic(config: BenchConfig) -> Arm:
    """The service chooses K, and drafts ahead where it does so by itself; the draft alone proposes."""
    return drafting(AUTO, lookahead=config.drafts_ahead)


def served(config: BenchConfig) -> Arm:
    """The service as it comes: besides that it copies from the text."""
    return Arm("as served", AUTO, config.drafts_ahead, prompt_lookup=True)


def paceline_arms(config: BenchConfig, concurrency: int) -> list[Arm]:
    """Paceline's arms in the order they run, as a ring.

    At one request each K drafts without lookahead and with it. At several, plain decoding runs twice,
    half-way round from each other, so that no arm is far from both.
    """
    chosen = [automatic(config), served(config)]
    if concurrency == 1:
        return [PLAIN, *(drafting(k, lookahead=ahead) for k in config.k for ahead in (False, True)), *chosen]
    ring = [*fixed(config), *chosen]
    half = (len(ring) + 1) // 2
    return [*ring[:half], AGAIN, *ring[half:]]


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms beginning with another one each time: none always runs after the same neighbour's start."""
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]
