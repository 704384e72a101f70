"""Tokens a round and a second, chains against trees: `python -m tools.measure_trees [--json]`.

With several drafts also chains and trees that two, three and so on propose together, in the order in which
the drafts are named, models first.

One target, enlarged, and a coordinator for each number of drafts; one request at a time. The arms take turns,
so that a change of the machine's speed hits all of them; a rate is a ratio of sums over all prompts. Every
request has its own cache salt, so that no prompt is in the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.assets import prompts_of_all_kinds
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


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding."""

    drafts: int
    """How many propose, and which coordinator is asked."""
    speculation: dict[str, Any]


def arms(width: int, depth: int, drafts: int) -> dict[str, Arm]:
    """All arms by name."""
    found = {"plain": Arm(1, {"num_speculative_tokens": 0})}
    for count in range(1, drafts + 1):
        by = {"drafter": "draft", "drafts_per_sequence": count}
        suffix = f", {count} drafts" if count > 1 else ""
        for k in CHAINS:
            bound = {"max_tree_nodes": count * k} if count > 1 else {}  # a whole chain of each draft
            chain = {"num_speculative_tokens": k, "tree_width": 1} | bound
            found[f"chain {k}{suffix}"] = Arm(count, chain | by)
        for nodes in NODES:
            tree = {"num_speculative_tokens": depth, "tree_width": width, "max_tree_nodes": nodes}
            found[f"tree {nodes}{suffix}"] = Arm(count, tree | by)
    return found


@contextlib.contextmanager
def serving(target: str, models: Sequence[str], drafters: Sequence[str]) -> Iterator[list[Client]]:
    """Clients of coordinators with the first draft, the first two and so on."""
    config = StackConfig(target_model=target, draft_model=tuple(models))
    with serve_stack(config, sink=discard) as stack, contextlib.ExitStack() as clients:
        first = stack.config.draft_config
        further = stack.start(
            *((f"draft {name}", "draft-worker", replace(first, drafter=name)) for name in drafters)
        )
        roles = [role for role in stack.config.worker_roles if role != "target"]
        drafts = (*map(stack.address_of, roles), *(each.address for each in further))
        every = stack.config.coordinator_config((stack.address_of("target"),), drafts)
        configs = [
            replace(every, drafts=drafts[:count], drafts_per_sequence=count)
            for count in range(1, len(drafts) + 1)
        ]
        coordinators = stack.start(
            *((f"coordinator of {len(each.drafts)} drafts", "coordinator", each) for each in configs)
        )
        yield [clients.enter_context(Client(each.address)) for each in coordinators]


def main() -> None:
    """Write a row for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded:target@7")
    parser.add_argument("--draft-model", action="append", help="embedded:draft by default")
    parser.add_argument("--drafter", action="append", help="a further draft, without a model, such as ngram")
    parser.add_argument("--acceptance", default="coupled")
    parser.add_argument("--temperature", type=float, action="append", help="0 and 1 by default")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    models, drafters = asked.draft_model or ["embedded:draft"], asked.drafter or []
    with serving(asked.target_model, models, drafters) as clients:
        found = measured(clients, asked, arms(asked.width, asked.depth, len(clients)))
    if asked.json:
        json.dump(found, sys.stdout, indent=1)
        return
    for temperature, rows in found.items():
        print(f"temperature {temperature}: tokens a round, tokens a second over plain, over the best chain")
        for name, row in rows.items():
            print(f"{name:20}{row['a_round']:8.2f}{row['over_plain']:8.2f}{row['over_chain']:8.2f}")


def measured(
    clients: Sequence[Client], asked: argparse.Namespace, of_arms: dict[str, Arm]
) -> dict[str, dict[str, dict[str, float]]]:
    """By temperature and arm."""
    salts = itertools.count()
    temperatures = asked.temperature or [0.0, 1.0]
    sums: dict[tuple[float, str], Sums] = defaultdict(Sums)
    texts = prompts_of_all_kinds().read_text()
    prompts = [json.loads(line)["prompt"] for line in texts.splitlines()]
    # The first round of all warms the service up, and is not counted.
    for repeat in range(asked.repeats + 1):
        for prompt, temperature, arm in itertools.product(prompts, temperatures, of_arms):
            speculation = of_arms[arm].speculation
            if speculation["num_speculative_tokens"]:
                speculation = speculation | {"acceptance": asked.acceptance}
            begun = time.perf_counter()
            result = clients[of_arms[arm].drafts - 1].generate(
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
        best = max(rates[f"chain {k}"] for k in CHAINS)
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
