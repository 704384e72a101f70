"""The choice between chain and tree in the closed loop: `python -m tests.sim.tree_choice [--json]`.

Tokens per second by machine, load and text: plain, the best fixed chain, the best fixed tree, and three
policies: chains alone, trees alone, and both. `share` is that of both over the better of the other two. Means
over the seeds, measured after the first seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import GoodputPolicy, Policy
from paceline.core.types import TreeShape
from tests.sim.closed_loop import MAX_K, RANKS, Always, ClosedLoop, Machine
from tests.sim.policy import ACCELERATOR, CORES, FROM, HEAVY, TEXTS, TO, Make, always

WIDTH, NODES = 4, 32
FIXED_CHAINS = (0, 1, 2, 3, 4, 6, 8)
FIXED_TREES = [(depth, nodes) for nodes in (8, 16, 32) for depth in (4, 8)]
FAR = (0.1, 0.05, 0.02)
"""Ranks of a draft whose second choices are hardly ever right."""
FAST_DRAFT = Machine(
    target_step=20e-3, target_sequence=2e-5, target_row=4e-5, draft_step=6e-4, draft_sequence=1e-5
)


@dataclass(frozen=True)
class Setting:
    """A machine, a number of clients, and how their text relates to the draft."""

    machine: Machine
    requests: int
    text: str
    ranks: tuple[float, ...] = RANKS


SETTINGS = {
    "slow target, 1, alike": Setting(ACCELERATOR, 1, "alike"),
    "slow target, 1, alike, far": Setting(ACCELERATOR, 1, "alike", FAR),
    "slow target, 4, mixed": Setting(ACCELERATOR, 4, "mixed"),
    "slow target, 16, mixed": Setting(ACCELERATOR, 16, "mixed"),
    "fast draft, 1, alike": Setting(FAST_DRAFT, 1, "alike"),
    "fast draft, 4, mixed": Setting(FAST_DRAFT, 4, "mixed"),
    "fast draft, 64, mixed": Setting(FAST_DRAFT, 64, "mixed"),
    "two cores, 1, mixed": Setting(CORES, 1, "mixed"),
    "two cores, 8, alike": Setting(CORES, 8, "alike"),
    "costly rows, 1, easy": Setting(HEAVY, 1, "easy"),
    "costly rows, 4, alike": Setting(HEAVY, 4, "alike"),
    "costly rows, 16, easy": Setting(HEAVY, 16, "easy"),
}


def chains_alone(controller: Controller) -> Policy:
    """The policy of requests with `tree_width` 1."""
    return GoodputPolicy(controller, MAX_K)


def trees_alone(controller: Controller) -> Policy:
    """The policy of requests with a fixed `tree_width`."""
    return GoodputPolicy(controller, MAX_K, tree=TreeShape(WIDTH, NODES), draws_chains=False)


def both(controller: Controller) -> Policy:
    """The policy of requests with `tree_width` `auto`."""
    return GoodputPolicy(controller, MAX_K, tree=TreeShape(WIDTH, NODES))


def loop_of(setting: Setting, make: Make, seed: int) -> ClosedLoop:
    """A loop that has not begun."""
    return ClosedLoop(
        setting.machine,
        setting.requests,
        TEXTS[setting.text],
        prompt=100,
        seed=seed,
        make=make,
        ranks=setting.ranks,
        max_nodes=NODES,
    )


def rate(setting: Setting, make: Make, seeds: Iterable[int]) -> float:
    """Tokens per second after the first seconds; the mean over the seeds."""
    rates = []
    for seed in seeds:
        loop = loop_of(setting, make, seed)
        loop.run(FROM)
        made, begun = loop.made, loop.now
        loop.resume(TO)
        rates.append((loop.made - made) / (loop.now - begun))
    return mean(rates)


def always_tree(depth: int, nodes: int) -> Make:
    """A policy that drafts the same tree in every round."""
    return lambda _: Always(depth, TreeShape(WIDTH, nodes))


def policies(setting: Setting, seeds: Iterable[int]) -> dict[str, float]:
    """Tokens per second of the three policies."""
    seeds = list(seeds)
    return {make.__name__: rate(setting, make, seeds) for make in (chains_alone, trees_alone, both)}


def fixed(setting: Setting, seeds: Iterable[int]) -> dict[str, float]:
    """Tokens per second of plain decoding, the best chain and the best tree."""
    seeds = list(seeds)
    chains = {k: rate(setting, always(k), seeds) for k in FIXED_CHAINS}
    trees = {tree: rate(setting, always_tree(*tree), seeds) for tree in FIXED_TREES}
    return {"plain": chains[0], "chain": max(chains.values()), "tree": max(trees.values())}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.tree_choice", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs that are averaged")
    parser.add_argument("--only", default="", help="settings whose names begin so")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    rows = []
    for name, setting in SETTINGS.items():
        if not name.startswith(asked.only):
            continue
        seeds = range(1, asked.seeds + 1)
        row = fixed(setting, seeds) | policies(setting, seeds)
        row["share"] = row["both"] / max(row["chains_alone"], row["trees_alone"])
        rows.append(row)
        if not asked.json:
            print("|", " | ".join([name, *(f"{value:.4g}" for value in row.values())]), "|", flush=True)
    if asked.json:
        print(json.dumps([{key: round(value, 4) for key, value in row.items()} for row in rows]))


if __name__ == "__main__":
    main()
