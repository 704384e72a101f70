"""Tokens per second over plain decoding, by text and source: `python -m tools.measure_sources [--json]`.

One service with an enlarged target, one request at a time. The arms take turns, so that a change of the
machine's speed hits all of them; each figure is a ratio of medians. Every request has its own cache salt:
suffix drafting has no earlier answers, and no prompt is in the prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from paceline.assets import prompts_of_all_kinds
from paceline.client import Client
from paceline.supervisor import StackConfig, discard, serve_stack

ARMS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"num_speculative_tokens": 0},
    "draft": {"num_speculative_tokens": 4, "drafter": "draft"},
    "prompt-lookup": {"num_speculative_tokens": 8, "drafter": "prompt-lookup"},
    "suffix": {"num_speculative_tokens": 8, "drafter": "suffix"},
    "ngram": {"num_speculative_tokens": 8, "drafter": "ngram"},
    "as served": {},
}


def main() -> None:
    """Write a row for each kind of text."""
    texts = prompts_of_all_kinds().read_text()
    prompts = [json.loads(line) for line in texts.splitlines()]
    kinds = list(dict.fromkeys(prompt["kind"] for prompt in prompts))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded:target@7")
    parser.add_argument("--draft-model", default="embedded:draft")
    parser.add_argument(
        "--kind", action="append", choices=kinds, metavar="KIND", help=f"{', '.join(kinds)}; all by default"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    prompts = [prompt for prompt in prompts if asked.kind is None or prompt["kind"] in asked.kind]
    config = StackConfig(target_model=asked.target_model, draft_model=asked.draft_model)
    with serve_stack(config, sink=discard) as stack, Client(stack.address) as client:
        found = measured(client, asked, prompts)
    if asked.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{'':20}" + "".join(f"{arm:>15}" for arm in ARMS))
    for kind, row in found.items():
        print(f"{kind:20}" + "".join(f"{row[arm]:15.2f}" for arm in ARMS))


def measured(
    client: Client, asked: argparse.Namespace, prompts: Sequence[dict[str, str]]
) -> dict[str, dict[str, float]]:
    """By kind and arm: tokens per second over those of plain decoding; of `plain` itself, per second."""
    salts = itertools.count()
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    # The first round of all teaches the service its costs, and is not counted.
    for repeat in range(asked.repeats + 1):
        for prompt, (arm, speculation) in itertools.product(prompts, ARMS.items()):
            sampling = {"temperature": asked.temperature, "seed": 1, "max_tokens": asked.max_tokens}
            begun = time.perf_counter()
            result = client.generate(
                prompt["prompt"],
                sampling | {"ignore_eos": True},
                speculation=speculation,
                cache_salt=f"measured {next(salts)}",
            )
            took = time.perf_counter() - begun
            if repeat:
                seconds[prompt["kind"], arm].append(took / len(result.token_ids))
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for (kind, arm), each in seconds.items():
        plain = statistics.median(seconds[kind, "plain"])
        table[kind][arm] = 1 / plain if arm == "plain" else plain / statistics.median(each)
    return table


if __name__ == "__main__":
    main()
