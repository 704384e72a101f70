"""`python -m benchmarks.service`: one request through the service, with and without speculation.

Every arm runs the same prompts on the same checkpoints in one process group; arms alternate prompt by
prompt, so that a slow moment of the machine hits all of them. Ratios are of the medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.prompts import PROMPTS
from paceline import AcceptanceMode, Client, GenerationResult, SamplingParams, SpeculationParams, assets
from paceline.decoding import theory
from paceline.supervisor import StackConfig, serve_stack

TEMPERATURES = (0.0, 1.0)


@dataclass(slots=True)
class Cell:
    """All runs of one arm at one temperature."""

    rates: list[float] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.rates)

    def share(self, *names: str) -> float:
        """Share of the rounds' time spent in the named parts."""
        total = sum(r.timings.total for r in self.results)
        return float(sum(getattr(r.timings, name) for r in self.results for name in names) / total)

    def seconds_per_round(self, *names: str) -> float:
        """Mean over all rounds."""
        rounds = sum(r.speculative_decoding.num_rounds for r in self.results)
        return float(sum(getattr(r.timings, name) for r in self.results for name in names) / rounds)

    @property
    def acceptance(self) -> float:
        """Accepted over drafted."""
        drafted = sum(r.speculative_decoding.num_draft_tokens for r in self.results)
        accepted = sum(r.speculative_decoding.num_accepted_draft_tokens for r in self.results)
        return accepted / drafted if drafted else 0.0

    @property
    def mean_length(self) -> float:
        """1 + accepted / rounds with a proposal."""
        steps = sum(r.speculative_decoding.num_spec_steps for r in self.results)
        accepted = sum(r.speculative_decoding.num_accepted_draft_tokens for r in self.results)
        return 1 + accepted / steps if steps else 1.0

    @property
    def first_position(self) -> float:
        """Acceptance at the first draft token: the theory's alpha, which no later position colours."""
        stats = [r.speculative_decoding for r in self.results if r.speculative_decoding.num_spec_steps]
        steps = sum(s.num_spec_steps for s in stats)
        return 1 - sum(s.acceptance_histogram[0] for s in stats) / steps if steps else 0.0


Arm = Callable[[str, Sequence[int], float, int, Cell], None]


def _through_service(client: Client, k: int, mode: AcceptanceMode, max_tokens: int) -> Arm:
    def run(prompt: str, ids: Sequence[int], temperature: float, seed: int, cell: Cell) -> None:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True)
        speculation = SpeculationParams(num_speculative_tokens=k, acceptance=mode)
        begun = time.perf_counter()
        result = client.generate(prompt, sampling, speculation=speculation)
        cell.rates.append(len(result.token_ids) / (time.perf_counter() - begun))
        cell.results.append(result)

    return run


def _through_peer(peer: Callable[[Sequence[int], float, int], float]) -> Arm:
    def run(prompt: str, ids: Sequence[int], temperature: float, seed: int, cell: Cell) -> None:
        cell.rates.append(peer(ids, temperature, seed))

    return run


def measure(
    arms: dict[str, Arm], prompts: dict[str, Sequence[int]], repeats: int
) -> dict[tuple[str, float], Cell]:
    """Run all arms; the first round over them warms up and does not count."""
    cells = {(name, t): Cell() for name in arms for t in TEMPERATURES}
    for repeat in range(repeats + 1):
        for index, (prompt, ids) in enumerate(prompts.items()):
            if repeat == 0 and index:
                continue
            for temperature in TEMPERATURES:
                for name, arm in arms.items():
                    cell = cells[name, temperature] if repeat else Cell()
                    arm(prompt, ids, temperature, 1000 * repeat + index, cell)
    return cells


def report(cells: dict[tuple[str, float], Cell], plain: str, k: int) -> list[str]:
    """A Markdown table of the ratios."""
    lines = [
        "| arm | T | tokens/s | over plain | acceptance | tokens/round | draft ms | target ms "
        "| coordinator + wire |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, t), cell in cells.items():
        row = [name, f"{t:g}", f"{cell.median:.1f}", f"{cell.median / cells[plain, t].median:.2f}"]
        if cell.results:
            speculative = any(r.speculative_decoding.num_spec_steps for r in cell.results)
            row += [f"{cell.acceptance:.2f}", f"{cell.mean_length:.2f}"] if speculative else ["-", "-"]
            row += [f"{cell.seconds_per_round(part) * 1e3:.2f}" for part in ("draft", "target")]
            row.append(f"{cell.share('coordinator', 'wire'):.1%}")
        else:
            row += ["-"] * 5
        lines.append("| " + " | ".join(row) + " |")
    return lines


def predicted(cell: Cell, plain: Cell, k: int) -> float:
    """Theorem 3.8 from this run's alpha and c (draft time of one token over the target's plain step)."""
    c = cell.seconds_per_round("draft") / k / plain.seconds_per_round("target")
    return theory.speedup(cell.first_position, c, k)


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded:target")
    parser.add_argument("--draft-model", default="embedded:draft")
    parser.add_argument("--k", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Draft and target each get their threads; transformers gets as many for its models.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stack_config = StackConfig(
        target_model=args.target_model,
        draft_model=args.draft_model,
        target_threads=args.threads,
        draft_threads=args.threads,
        target_device=args.device,
        draft_device=args.device,
        num_blocks=1024,
    )
    with serve_stack(stack_config) as stack, Client(stack.address) as client:
        prompts: dict[str, Sequence[int]] = {prompt: client.tokenize(prompt) for prompt in PROMPTS}
        plain = "paceline, plain"
        arms: dict[str, Arm] = {plain: _through_service(client, 0, AcceptanceMode.COUPLED, args.max_tokens)}
        for mode in AcceptanceMode:
            arms[f"paceline, {mode.value}"] = _through_service(client, args.k, mode, args.max_tokens)
        if not args.no_peers:
            from benchmarks.peers import Transformers

            peer = Transformers(
                assets.resolve(args.target_model),
                assets.resolve(args.draft_model),
                args.threads,
                args.max_tokens,
                args.k,
            )
            arms["transformers, generate"] = _through_peer(peer.plain)
            arms["transformers, assisted generation"] = _through_peer(peer.assisted)
        # The client must not collect garbage among what transformers loaded while a round waits for it.
        gc.collect()
        gc.freeze()
        cells = measure(arms, prompts, args.repeats)
    ratios: dict[str, Any] = {}
    for t in TEMPERATURES:
        best = cells["paceline, coupled", t]
        ratios[f"speculative_over_plain_t{t:g}"] = best.median / cells[plain, t].median
        ratios[f"measured_over_theory_t{t:g}"] = (
            best.median / cells[plain, t].median / predicted(best, cells[plain, t], args.k)
        )
        ratios[f"coordinator_and_wire_share_t{t:g}"] = best.share("coordinator", "wire")
        for name, key in (("generate", "over_generate"), ("assisted generation", "over_assisted_generation")):
            peer_cell = cells.get((f"transformers, {name}", t))
            if peer_cell is not None:
                ratios[f"{key}_t{t:g}"] = best.median / peer_cell.median
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, K={args.k}, "
        f"{args.threads} thread(s) a model, {args.max_tokens} tokens, "
        f"{len(PROMPTS)} prompts x {args.repeats}\n"
    )
    print("\n".join(report(cells, plain, args.k)))
    print()
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    if args.json:
        rows = {f"{name} @ {t:g}": cell.median for (name, t), cell in cells.items()}
        args.json.write_text(json.dumps({"ratios": ratios, "tokens_per_second": rows}, indent=2))


if __name__ == "__main__":
    main()
