"""`python -m paceline.assets.training all`: train the embedded pair.

The stages are: the tokenizer, the target on the corpus, the draft on the target's distributions, the export
to safetensors, and the figures of the model card. Each stage resumes where it stopped.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import assets
from paceline.assets.training import corpus, deepen, distill, models
from paceline.assets.training.export import export
from paceline.assets.training.measure import agreement
from paceline.assets.training.record import BatchArchive
from paceline.assets.training.trainer import TrainingPlan, held_out_loss, next_token_loss, train

WRITTEN_BATCHES = 7
OWN_TEXT_REPEATS = 8
MORE_SAMPLED_BATCHES = 12
MORE_GREEDY_BATCHES = 4
MORE_TEXT_REPEATS = 5


def _prepare(work: Path) -> tuple[torch.Tensor, torch.Tensor]:
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
    return parts[0], parts[1]


def _train_narrow_target(
    work: Path, tokens: torch.Tensor, held_out: torch.Tensor, seed: int, device: torch.device
) -> None:
    """Train a third of the layers, then the full stack grown from them."""
    shallow = models.build(models.narrow_target_config(layers=4), seed).to(device)
    plan = TrainingPlan(steps=1400, seed=seed, long_share=0.0, decay_share=0.0)
    train(shallow, tokens, plan, next_token_loss, work / "shallow.pt", "shallow target")
    target = models.grow(shallow, models.narrow_target_config()).to(device)
    plan = TrainingPlan(steps=720, seed=seed + 1, warmup=20, decay_share=0.6)
    train(target, tokens, plan, next_token_loss, work / "narrow-target.pt", "narrow target")
    print(f"held-out loss {held_out_loss(target, held_out):.3f}", flush=True)


def _train_target(
    work: Path, tokens: torch.Tensor, held_out: torch.Tensor, seed: int, device: torch.device
) -> None:
    """Add neurons to every layer and continue the training."""
    narrow = _shipped(work, "narrow-target", models.narrow_target_config(), device)
    target = models.enlarged(narrow, models.target_config(), seed + 11).to(device)
    plan = TrainingPlan(
        steps=600,
        seed=seed + 11,
        tokens_per_pass=1024,
        long_share=0.15,
        warmup=20,
        decay_share=0.7,
        muon_lr=0.015,
        adamw_lr=1.5e-3,
    )
    train(target, tokens, plan, next_token_loss, work / "target.pt", "target")
    print(f"held-out loss {held_out_loss(target, held_out):.3f}", flush=True)


def _load(work: Path, name: str, config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    model = models.build(config, 0)
    model.load_state_dict(torch.load(work / f"{name}.pt", map_location=device, weights_only=True)["model"])
    return model.to(device).eval()


def _shipped(work: Path, name: str, config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    """A model as in its checkpoint: rounded to bfloat16."""
    return _load(work, name, config, device).bfloat16().float()


def _train_wide_draft(work: Path, tokens: torch.Tensor, seed: int, device: torch.device) -> None:
    """Train on the corpus, then on the target's distributions on the corpus, on its own text, and on both.

    The last and longest stage has more of the target's own text, including greedy text.
    """
    target = _load(work, "narrow-target", models.narrow_target_config(), device)
    draft = distill.start_from(target, models.build(models.wide_draft_config(), seed + 2).to(device))
    plan = TrainingPlan(steps=700, seed=seed + 2, long_share=0.0, decay_share=0.0)
    train(draft, tokens, plan, next_token_loss, work / "draft-corpus.pt", "draft on the corpus")
    imitate = distill.imitation_loss(target)
    plan = TrainingPlan(steps=500, seed=seed + 3, long_share=0.0, decay_share=0.2)
    train(draft, tokens, plan, imitate, work / "draft-imitation.pt", "draft on the target's view of it")
    own = distill.written_by(target, tokens, WRITTEN_BATCHES, seed + 4, work)
    plan = TrainingPlan(steps=300, seed=seed + 5, long_share=0.0, warmup=10, decay_share=0.9, muon_lr=0.01)
    train(draft, own, plan, imitate, work / "draft-own.pt", "draft on the target's text")
    mixed = torch.cat([tokens, *[own] * OWN_TEXT_REPEATS])
    plan = TrainingPlan(steps=800, seed=seed + 6, length=256, long_share=0.0, warmup=20, decay_share=0.7)
    train(draft, mixed, plan, imitate, work / "draft-both.pt", "draft on both")
    sampled = distill.written_by(target, tokens, MORE_SAMPLED_BATCHES, seed + 4, work)
    greedy = distill.written_by(target, tokens, MORE_GREEDY_BATCHES, seed + 7, work, temperature=0.0)
    mixed = torch.cat([tokens, *[sampled, greedy] * MORE_TEXT_REPEATS])
    plan = TrainingPlan(steps=1600, seed=seed + 8, length=256, long_share=0.0, warmup=20, decay_share=0.7)
    train(draft, mixed, plan, imitate, work / "draft-wide.pt", "draft on more of both")


def _train_small_draft(work: Path, tokens: torch.Tensor, seed: int, device: torch.device) -> None:
    """Convert the draft to two layers and train it on much more text of the narrow target."""
    target = _shipped(work, "narrow-target", models.narrow_target_config(), device)
    wide = _shipped(work, "draft-wide", models.wide_draft_config(), device)
    record = BatchArchive(target, tokens, work / "narrow-record", seed + 8)
    text = torch.from_numpy(record.batch(0)[0][:32]).to(device)
    draft = deepen.deepened(wide, models.small_draft_config(), text, seed + 9).to(device)
    deepen.train_on(record, draft, deepen.DeepeningPlan(seed=seed + 10), work / "draft-small.pt")


def _train_draft(work: Path, tokens: torch.Tensor, seed: int, device: torch.device) -> None:
    """Enlarge the draft (more neurons, twice the layers) and train it on the target's text."""
    target = _shipped(work, "target", models.target_config(), device)
    small = _shipped(work, "draft-small", models.small_draft_config(), device)
    draft = models.enlarged(small, models.draft_config(), seed + 12).to(device)
    record = BatchArchive(target, tokens, work / "record", seed + 13)
    plan = deepen.DeepeningPlan(steps=2000, steps_a_batch=16, seed=seed + 14)
    deepen.train_on(record, draft, plan, work / "draft.pt")


def _measure(work: Path, held_out: torch.Tensor, seed: int, device: torch.device) -> None:
    """Print the model card's figures, in float32 on the target's text after held-out prompts."""
    target = _load(work, "target", models.target_config(), device)
    draft = _load(work, "draft", models.draft_config(), device)
    print(
        f"held-out loss: target {held_out_loss(target, held_out):.3f}, "
        f"draft {held_out_loss(draft, held_out):.3f}"
    )
    for temperature in (0.0, 1.0):
        text = distill.written_by(target, held_out, 1, seed + 5, work, temperature)
        windows = text.view(distill.BATCH, -1)[:, : distill.PROMPT_TOKENS + 192]
        print(f"temperature {temperature}: {agreement(target, draft, windows, distill.PROMPT_TOKENS)}")


def _export(work: Path, device: torch.device) -> None:
    folder = Path(assets.__file__).parent
    for name, config in (("target", models.target_config()), ("draft", models.draft_config())):
        export(_load(work, name, config, device), work / "tokenizer.json", folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    models_in_order = ["narrow-target", "wide-draft", "small-draft", "target", "draft"]
    stages = ["tokenizer", *models_in_order, "export", "measure"]
    parser.add_argument("stage", choices=[*stages, "all"])
    parser.add_argument("--work", type=Path, default=Path("build/assets"))
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    tokens, held_out = _prepare(args.work)
    for stage in stages if args.stage == "all" else [args.stage]:
        match stage:
            case "narrow-target":
                _train_narrow_target(args.work, tokens, held_out, args.seed, device)
            case "target":
                _train_target(args.work, tokens, held_out, args.seed, device)
            case "wide-draft":
                _train_wide_draft(args.work, tokens, args.seed, device)
            case "small-draft":
                _train_small_draft(args.work, tokens, args.seed, device)
            case "draft":
                _train_draft(args.work, tokens, args.seed, device)
            case "export":
                _export(args.work, device)
            case "measure":
                _measure(args.work, held_out, args.seed, device)


if __name__ == "__main__":
    main()
