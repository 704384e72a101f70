"""Tokens a second of a fleet: `python -m tools.fleet --targets 4 …`.

Every round takes a round of a coordinator, K tokens of a draft worker and K + 1 rows of a target worker. The
kind of process with the least capacity bounds the rate of all rounds; with few sequences the time of a round
does.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from paceline.core.errors import InvalidArgumentError
from paceline.decoding import theory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Numbers of processes, and what each of a kind carries by itself.

    Raises InvalidArgumentError naming the field.
    """

    targets: int
    drafts: int
    coordinators: int
    target_rows: float
    """Rows a second of one target at the load it is to have: sequences × (K + 1) / seconds of a pass."""
    draft_tokens: float
    """Tokens a second of one draft worker, over all of its sequences."""
    coordinator_rounds: float
    """Rounds a second of one coordinator: `python -m tools.coordinator_rounds`."""

    def __post_init__(self) -> None:
        for name in ("targets", "coordinators", "target_rows", "coordinator_rounds"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in ("drafts", "draft_tokens"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")

    def rounds(self, k: int) -> dict[str, float]:
        """Rounds a second that each kind of process carries with K draft tokens."""
        drafted = self.drafts * self.draft_tokens / k if k else math.inf
        return {
            "targets": self.targets * self.target_rows / (k + 1),
            "drafts": drafted,
            "coordinators": self.coordinators * self.coordinator_rounds,
        }

    def rate(self, alpha: float, k: int, sequences: float = math.inf, round_seconds: float = 0.0) -> Rate:
        """What the fleet gives at most.

        `sequences` run at the same time, and a round of one takes `round_seconds` where nothing waits.
        """
        bounds = self.rounds(k)
        if round_seconds:
            bounds["sequences"] = sequences / round_seconds
        limit = min(bounds, key=lambda kind: bounds[kind])
        return Rate(theory.expected_tokens(alpha, k) * bounds[limit], limit, bounds[limit])


@dataclass(frozen=True, slots=True)
class Rate:
    """What a fleet gives, and what bounds it."""

    tokens: float
    """A second."""
    limit: str
    """The kind of process with the least capacity, or `sequences`."""
    rounds: float
    """A second."""


def _check(name: str, value: float, holds: bool, wanted: str) -> None:
    if not (holds and math.isfinite(value)):
        raise InvalidArgumentError(name, f"must be {wanted}, got {value}")


def main() -> None:
    """Write one line for each K."""
    parser = argparse.ArgumentParser(description="Tokens a second of a fleet, by K.")
    for name, default in (("targets", 1), ("drafts", 1), ("coordinators", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--target-rows", type=float, required=True, help="rows a second of one target")
    parser.add_argument("--draft-tokens", type=float, required=True, help="tokens a second of one draft")
    parser.add_argument("--coordinator-rounds", type=float, required=True, help="rounds a second of one")
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--k", type=int, nargs="+", default=[0, 2, 4, 8])
    asked = vars(parser.parse_args())
    alpha, ks = asked.pop("alpha"), asked.pop("k")
    fleet = Fleet(**asked)
    print(f"{'K':>3}{'tokens/s':>10}{'rounds/s':>10}  bounded by")
    for k in ks:
        rate = fleet.rate(alpha, k)
        print(f"{k:3}{rate.tokens:10.0f}{rate.rounds:10.0f}  {rate.limit}")


if __name__ == "__main__":
    main()
