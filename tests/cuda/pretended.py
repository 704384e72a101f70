"""What rounds cost on a pretended CUDA device: `python -m tests.cuda.pretended [--json]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import torch
from transformers.utils import logging

from tests.cuda import rounds
from tests.cuda.device import PretendedCuda
from tests.cuda.workers import models_on
from tests.unit.engine.runners import captured_of


def main() -> None:
    """Write a row for each kind of round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object, with the places of waits")
    parser.add_argument("--device", default="cuda:0", type=torch.device)
    parser.add_argument("--torch-noise", action="store_true", help="coupled noise without Triton's kernels")
    asked = parser.parse_args()
    logging.disable_progress_bar()
    noise = "torch operations" if asked.torch_noise else "kernels, one launch a call with the CPU's numbers"
    with PretendedCuda(noise_kernels=not asked.torch_noise) as cuda:
        rows = rounds.all_rows(cuda, asked.device, lambda name: print(name, file=sys.stderr))
        models = models_on(asked.device)
        recorded = {
            name: captured_of(runner).num_recorded
            for name, runner in (("target", models.target), ("draft", models.draft))
        }
    if asked.json:
        told = {"device": f"pretended {asked.device}", "noise": noise, "recordings": recorded}
        print(json.dumps(told | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
        return
    print(f"coupled noise: {noise}")
    print(f"{'':44} {'waits':>11} {'launches':>15} {'bytes':>12}")
    for row in rows:
        aims = (f"({row.aim[part]})" if part in row.aim else "" for part in ("waits", "launches"))
        waits, launches = (f"{n:>5} {aim}" for n, aim in zip((row.waits, row.launches), aims, strict=True))
        print(f"{row.kind:44} {waits:>11} {launches:>15} {row.num_bytes:>12}")


if __name__ == "__main__":
    main()
