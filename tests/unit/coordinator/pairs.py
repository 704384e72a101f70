"""Pairs and sequences of which something is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

from coordinator.member import Verification
from coordinator.pair import Pair
from coordinator.policy import Goodput

MOST = 8
FAR = 10**9


def known_pair(verdict: Sequence[float], drafting: Sequence[float], sequences: int = 1) -> Pair:
    """A pair that has measured every K at this load, and makes no trials for now."""
    pair = Pair(MOST)
    load = pair.costs.at(sequences)
    for k in range(MOST + 1):
        for _ in range(100):
            load.verdict.observe(k, verdict[k])
            if k:
                load.drafting.observe(k, drafting[k])
    return pair


def without_trials(pair: Pair) -> None:
    for trials in pair._trials.values():
        trials.next = trials.doubts = FAR


def learned(one: Goodput, acceptance: float, rounds: int = 400) -> Goodput:
    """After many verdicts in which each draft token that was looked at had this acceptance."""
    rng = random.Random(1)
    for _ in range(rounds):
        accepted = next((i for i in range(MOST) if rng.random() >= acceptance), MOST)
        one.habits.drafts.observe(MOST, accepted)
    return one


def crowd(pair: Pair, size: int, acceptance: float | None = None) -> list[Goodput]:
    """So many sequences that all verify, with `learned` acceptance if one is given."""
    members = [Goodput(pair, MOST) for _ in range(size)]
    for one in members:
        if acceptance is not None:
            learned(one, acceptance)
        one.verifying(0, prefills=False)
    return members


def settled(pair: Pair, acceptance: float) -> Goodput:
    one = learned(Goodput(pair, MOST), acceptance)
    one.choose(MOST, 0, 1000)
    without_trials(pair)
    return one


def rounds(one: Goodput, count: int, wait: float = 0.5) -> list[int]:
    """K of so many rounds, all of whose draft tokens are rejected, and which are waited for so long."""
    chosen = []
    for _ in range(count):
        k = one.choose(MOST, 0, 1000)
        if k:
            one.asks(0)
            one.proposed(k, wait, 0)
        one.verifying(k, prefills=False)
        one.judged(k, 0, Verification(1.0, k + 1, 1))
        chosen.append(k)
    return chosen
