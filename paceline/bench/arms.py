"""Which ways of decoding a run compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.config import BenchConfig
from paceline.core.checks import AUTO, DraftTokens
from paceline.core.types import AcceptanceMode, SpeculationParams


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding. All but the name are Paceline's; a peer has a name only."""

    name: str
    k: DraftTokens | None = None
    acceptance: AcceptanceMode | None = None
    lookahead: bool = False
    prompt_lookup: bool = False

    @property
    def is_peer(self) -> bool:
        """True for another system."""
        return self.k is None

    @property
    def speculation(self) -> SpeculationParams:
        """What Paceline's requests ask for."""
        return SpeculationParams(
            num_speculative_tokens=self.k, acceptance=self.acceptance, prompt_lookup=self.prompt_lookup
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arm": self.name,
            "k": self.k,
            "acceptance": self.acceptance.value if self.acceptance else None,
            "lookahead": None if self.is_peer else self.lookahead,
            "prompt_lookup": None if self.is_peer else self.prompt_lookup,
        }


def plain(config: BenchConfig) -> Arm:
    """K = 0 through the same service."""
    return Arm("plain", 0, config.acceptance[0])


def plain_again(config: BenchConfig) -> Arm:
    """The same through another coordinator: by so much ratios of this run differ from 1 for no reason."""
    return Arm("plain, again", 0, config.acceptance[0], lookahead=True)


def speculative(k: DraftTokens, mode: AcceptanceMode, *, lookahead: bool) -> Arm:
    """Draft and verify; `lookahead` drafts ahead of the verdict."""
    wording = "lookahead" if lookahead else "speculative"
    return Arm(f"{wording}, {mode.value}, K={k}", k, mode, lookahead)


def fixed(config: BenchConfig) -> list[Arm]:
    """Every choice of a fixed K beside which the service's own is seen, plain decoding among them."""
    return [plain(config), *(drafting(config, k, lookahead=config.drafts_ahead) for k in config.k)]


def drafting(config: BenchConfig, k: int, *, lookahead: bool = True) -> Arm:
    """K draft tokens in every round, in the first acceptance mode; with `config.k[0]` the arm of the headline
    ratios."""
    return speculative(k, config.acceptance[0], lookahead=lookahead)


def automatic(config: BenchConfig) -> Arm:
    """The service chooses K, and drafts ahead where it does so by itself; the draft alone proposes."""
    return speculative(AUTO, config.acceptance[0], lookahead=config.drafts_ahead)


def served(config: BenchConfig) -> Arm:
    """The service as it comes: besides that it copies from the text."""
    mode = config.acceptance[0]
    return Arm(f"as served, {mode.value}, K={AUTO}", AUTO, mode, config.drafts_ahead, prompt_lookup=True)


def paceline_arms(config: BenchConfig, concurrency: int) -> list[Arm]:
    """Paceline's arms. Acceptance modes other than the first, and what lookahead is worth with a K other than
    the first, are compared at one request only, plain decoding with itself at more."""
    both = (False, True)
    alone = concurrency == 1
    modes = config.acceptance if alone else config.acceptance[:1]
    compared = [speculative(config.k[0], mode, lookahead=ahead) for mode in modes for ahead in both]
    if alone:
        compared += [drafting(config, k, lookahead=ahead) for k in config.k[1:] for ahead in both]
    again = [] if alone else [plain_again(config)]
    choosing = [automatic(config), served(config)]
    return list(dict.fromkeys([plain(config), *again, *compared, *fixed(config), *choosing]))


def spaced(config: BenchConfig, arms: Sequence[Arm]) -> list[Arm]:
    """The order to run them in, as a ring: where plain decoding runs twice, half-way round from each other,
    so that none of the others is far from both."""
    again = plain_again(config)
    if again not in arms:
        return list(arms)
    others = [arm for arm in arms if arm != again]
    return [*others[: len(arms) // 2], again, *others[len(arms) // 2 :]]


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms beginning with another one each time: none always runs after the same neighbour's start."""
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]
