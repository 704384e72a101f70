"""Tokens a round and a second, chains against trees: `python -m tools.measure_trees [--json]`.

One service with an enlarged target, one request at a time. The arms take turns, so that a change of the
machine's speed hits all of them; a rate is a ratio of sums over all prompts. Every request has its own cache
salt, so that no prompt is in the prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from paceline.client import Client
from paceline.supervisor import StackConfig, discard, serve_stack

NODES: Final = (8, 16, 32)
CHAINS: Final = (4, 8)


@dataclass(slots=True)
class Sums:
    """What the requests of one arm at one temperature took."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0


def arms(width: int, depth: int, drafts: int) -> dict[str, dict[str, Any]]:
    """Speculation of each arm, by its name."""
    by_draft = {"drafter": "draft"}
    found: dict[str, dict[str, Any]] = {"plain": {"num_speculative_tokens": 0}}
    found |= {f"chain {k}": {"num_speculative_tokens": k, "tree_width": 1} | by_draft for k in CHAINS}
    for count in range(1, drafts + 1):
        for nodes in NODES:
            tree = {"num_speculative_tokens": depth, "tree_width": width, "max_tree_nodes": nodes}
            name = f"tree {nodes}" + (f", {count} drafts" if count > 1 else "")
            found[name] = tree | {"drafts_per_sequence": count} | by_draft
    return found


def main() -> None:
    """Write a row for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded:target@7")
    parser.add_argument("--draft-model", action="append", help="embedded:draft by default")
    parser.add_argument("--acceptance", default="coupled")
    parser.add_argument("--temperature", type=float, action="append", help="0 and 1 by default")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    drafts = tuple(asked.draft_model or ["embedded:draft"])
    config = StackConfig(target_model=asked.target_model, draft_model=drafts, drafts_per_sequence=len(drafts))
    with serve_stack(config, sink=discard) as stack, Client(stack.address) as client:
        found = measured(client, asked, arms(asked.width, asked.depth, len(drafts)))
    if asked.json:
        json.dump(found, sys.stdout, indent=1)
        return
    for temperature, rows in found.items():
        print(f"temperature {temperature}: tokens a round, tokens a second over plain, over the best chain")
        for name, row in rows.items():
            print(f"{name:20}{row['a_round']:8.2f}{row['over_plain']:8.2f}{row['over_chain']:8.2f}")


def measured(
    client: Client, asked: argparse.Namespace, of_arms: dict[str, dict[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """By temperature and arm."""
    salts = itertools.count()
    temperatures = asked.temperature or [0.0, 1.0]
    sums: dict[tuple[float, str], Sums] = defaultdict(Sums)
    texts = files("paceline.assets").joinpath("prompts/kinds.jsonl").read_text()
    prompts = [json.loads(line)["prompt"] for line in texts.splitlines()]
    # The first round of all warms the service up, and is not counted.
    for repeat in range(asked.repeats + 1):
        for prompt, temperature, arm in itertools.product(prompts, temperatures, of_arms):
            speculation = of_arms[arm]
            if speculation["num_speculative_tokens"]:
                speculation = speculation | {"acceptance": asked.acceptance}
            begun = time.perf_counter()
            result = client.generate(
                prompt,
                {
                    "temperature": temperature,
                    "seed": repeat,
                    "max_tokens": asked.max_tokens,
                    "ignore_eos": True,
                },
                speculation=speculation,
                cache_salt=f"measured {next(salts)}",
            )
            took = time.perf_counter() - begun
            if repeat:
                of_arm = sums[temperature, arm]
                of_arm.tokens += len(result.token_ids)
                of_arm.rounds += result.speculative_decoding.num_rounds
                of_arm.seconds += took
    table: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for temperature in temperatures:
        rates = {arm: sums[temperature, arm].tokens / sums[temperature, arm].seconds for arm in of_arms}
        best = max(rate for arm, rate in rates.items() if arm.startswith("chain"))
        for arm in of_arms:
            of_arm = sums[temperature, arm]
            table[f"{temperature:g}"][arm] = {
                "a_round": of_arm.tokens / of_arm.rounds if of_arm.rounds else 1.0,
                "over_plain": rates[arm] / rates["plain"],
                "over_chain": rates[arm] / best,
            }
    return table


if __name__ == "__main__":
    main()
