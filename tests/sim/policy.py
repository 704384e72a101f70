"""The choice of K in the closed loop, beside plain decoding and every fixed K: `python -m tests.sim.policy`.

It prints JSON: tokens per second, means over the seeds; `steady` is measured after the first seconds, `cold`
from the start; `least` and `greatest` are the seeds' own. `share` is `steady` as a share of the best fixed K,
0 among them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import GoodputPolicy, Policy
from tests.sim.closed_loop import MAX_K, Always, ClosedLoop, Machine, constant, text_of_all_kinds

Acceptance = Callable[[int, float], Callable[[int], float]]
Make = Callable[[Controller], Policy]

CORES = Machine()
SHARED = Machine(contention=1.6, message=1.5e-4)
"""The workers slow each other down, and messages are slow."""
ACCELERATOR = Machine(
    target_step=20e-3, target_sequence=2e-5, target_row=2e-5, draft_step=2e-3, draft_sequence=1e-5
)
"""A slow target whose rows cost next to nothing."""
CROWDED = Machine(
    target_step=1.7e-3,
    target_sequence=6e-4,
    target_row=1e-4,
    draft_step=3e-4,
    draft_sequence=8e-5,
    wire=4e-4,
    message=1.5e-4,
    contention=2.5,
)
"""Steps are short, messages are not, and a draft token costs others a lot: hope is expensive."""
FAR = Machine(wire=8e-3)
HEAVY = Machine(target_step=16e-3, target_sequence=4e-4, target_row=2e-3, draft_step=8e-4)
"""A target of 155M parameters on one core: a row is arithmetic."""
MACHINES = {"cores": CORES, "shared": SHARED, "crowded": CROWDED}
TEXTS: dict[str, Acceptance] = {
    "alike": constant(0.65),
    "easy": constant(0.9),
    "hard": constant(0.3),
    "mixed": text_of_all_kinds,
}
FIXED = (1, 2, 4, MAX_K)
FROM, TO = 12.6, 31.4
"""Seconds of a steady run that are measured: whole periods of the drift, after the first trials."""
COLD = 8.0
"""Seconds of a cold run."""


def steady(machine: Machine, requests: int, text: Acceptance, make: Make, seed: int) -> float:
    """Tokens per second after the first seconds."""
    loop = ClosedLoop(machine, requests, text, prompt=100, seed=seed, make=make)
    loop.run(FROM)
    made, begun = loop.made, loop.now
    loop.resume(TO)
    return (loop.made - made) / (loop.now - begun)


def cold(machine: Machine, requests: int, text: Acceptance, make: Make, seed: int) -> float:
    """Tokens per second of a service that was just started."""
    loop = ClosedLoop(machine, requests, text, prompt=100, seed=seed, make=make)
    return loop.run(COLD)


def always(k: int) -> Make:
    """A policy that does the same in every round."""
    return lambda _: Always(k)


def chosen(controller: Controller) -> Policy:
    """The policy under test."""
    return GoodputPolicy(controller, MAX_K)


def measure(machine: Machine, requests: int, text: Acceptance, seeds: Iterable[int]) -> dict[str, Any]:
    """Tokens per second of plain decoding, each fixed K and the policy."""
    seeds = list(seeds)

    def average(run: Callable[..., float], make: Make) -> float:
        return mean(run(machine, requests, text, make, seed) for seed in seeds)

    each = [steady(machine, requests, text, chosen, seed) for seed in seeds]
    return {
        "plain": average(steady, always(0)),
        "fixed": {str(k): average(steady, always(k)) for k in FIXED},
        "policy": {
            "steady": mean(each),
            "cold": average(cold, chosen),
            "least": min(each),
            "greatest": max(each),
        },
    }


def best_of(result: dict[str, Any]) -> float:
    """Tokens per second of the best fixed K, 0 included."""
    return max(result["plain"], *result["fixed"].values())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.policy", description=__doc__)
    parser.add_argument("--target-step", type=float, default=20e-3, help="seconds of a pass of the target")
    parser.add_argument("--draft-step", type=float, default=2e-3, help="seconds of a step of the draft")
    parser.add_argument("--row", type=float, default=2e-5, help="seconds that a row adds to a pass")
    parser.add_argument("--sequence", type=float, default=2e-5, help="seconds that a sequence adds to a pass")
    parser.add_argument("--wire", type=float, default=3e-4, help="seconds of a message")
    parser.add_argument("--contention", type=float, default=1.0, help="slow-down while both models compute")
    parser.add_argument("--requests", type=int, default=64, help="requests at a time")
    parser.add_argument(
        "--acceptance", default="0.9", help="of a draft token: a rate, or mixed for easy and hard stretches"
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs that are averaged")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="on one line")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    machine = Machine(
        target_step=asked.target_step,
        target_sequence=asked.sequence,
        target_row=asked.row,
        draft_step=asked.draft_step,
        draft_sequence=asked.sequence / 2,
        wire=asked.wire,
        contention=asked.contention,
    )
    text = text_of_all_kinds if asked.acceptance == "mixed" else constant(float(asked.acceptance))
    result = measure(machine, asked.requests, text, seeds)
    result["share"] = result["policy"]["steady"] / best_of(result)
    print(json.dumps(_rounded(result), indent=None if asked.json else 2))


if __name__ == "__main__":
    main()
