"""`python -m paceline.assets.training tokenizer|target|draft|export`: make the embedded pair.

The steps in order: the tokenizer, the target on the text, the draft on the text and the target's
distributions, then the export to safetensors. Each one resumes where it stopped.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.assets.training import corpus, models
from paceline.assets.training.trainer import Plan, held_out_loss, next_token_loss, train


def _prepare(work: Path) -> tuple[Tokenizer, torch.Tensor, torch.Tensor]:
    text = corpus.read()
    tokenizer_file = work / "tokenizer.json"
    if not tokenizer_file.exists():
        corpus.train_tokenizer(text.train).save(str(tokenizer_file))
        (work / "corpus.txt").write_text(
            f"CPython {platform.python_version()} standard library\nsha256 {text.digest}\n"
            f"{len(text.train)} training files, {len(text.held_out)} held out\n"
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    parts = []
    for name, files in (("train", text.train), ("held_out", text.held_out)):
        cache = work / f"{name}.npy"
        if not cache.exists():
            np.save(cache, corpus.encode(tokenizer, files))
        parts.append(torch.from_numpy(np.load(cache).astype(np.int64)))
    print(f"{len(parts[0])} training tokens, {len(parts[1])} held out", flush=True)
    return tokenizer, parts[0], parts[1]


def _train_target(
    work: Path, tokens: torch.Tensor, held_out: torch.Tensor, seed: int, device: torch.device
) -> None:
    """A third of the depth first, then the full stack grown from it."""
    shallow = models.build(models.target_config(layers=4), seed).to(device)
    plan = Plan(steps=1400, seed=seed, long_share=0.0, decay_share=0.0)
    train(shallow, tokens, plan, next_token_loss, work / "shallow.pt", "shallow target")
    target = models.grow(shallow, models.target_config()).to(device)
    plan = Plan(steps=1000, seed=seed + 1, warmup=20, decay_share=0.6)
    train(target, tokens, plan, next_token_loss, work / "target.pt", "target")
    print(f"held-out loss {held_out_loss(target, held_out):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["tokenizer", "target"])
    parser.add_argument("--work", type=Path, default=Path("build/assets"))
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    _, tokens, held_out = _prepare(args.work)
    if args.stage == "target":
        _train_target(args.work, tokens, held_out, args.seed, torch.device(args.device))


if __name__ == "__main__":
    main()
