"""The training loop of both models: resumable and reproducible from the seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from paceline.assets.training import corpus
from paceline.assets.training.models import Optimisers, schedule

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits float32 [N, V], windows int64 [B, L + 1]) -> scalar loss."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Length of the training and shape of its steps.

    Every optimiser step has `tokens_per_step` tokens at every window length, in passes of at most
    `tokens_per_pass` tokens (or one window), because small passes keep activations in a CPU's cache.
    """

    steps: int
    seed: int
    tokens_per_step: int = 4096
    tokens_per_pass: int = 2048
    length: int = 512
    long_length: int = 2048
    long_share: float = 0.12
    warmup: int = 40
    decay_share: float = 0.5
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    checkpoint_every: int = 50

    def length_at(self, step: int) -> int:
        """Window length: short at first, the full context in the last share of the run."""
        return self.long_length if step >= self.steps * (1 - self.long_share) else self.length


def next_token_loss(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the data in nats per token."""
    return F.cross_entropy(logits, windows[:, 1:].reshape(-1))


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 if the device supports it; emulation on other CPUs is many times slower than float32."""
    native = device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.autocast(device.type, torch.bfloat16, enabled=native)


def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int = 512, count: int = 64) -> float:
    """Mean cross-entropy over `count` evenly spaced held-out windows, nats per token."""
    device = next(model.parameters()).device
    starts = torch.linspace(0, len(tokens) - length - 2, count).long()
    windows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
    total = 0.0
    with torch.no_grad():
        for part in windows.split(8):
            moved = part.to(device)
            logits = model(moved[:, :-1], use_cache=False).logits
            total += next_token_loss(logits.float().flatten(0, 1), moved).item() * len(part)
    return total / count


def resume(checkpoint: Path, model: LlamaForCausalLM, optimisers: Optimisers, name: str) -> int:
    """Load the state written by `save`, if any, and return the next step."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=next(model.parameters()).device, weights_only=True)
    model.load_state_dict(state["model"])
    optimisers.load_state_dict(state["optimisers"])
    print(f"{name}: resumed at step {state['step']}", flush=True)
    return int(state["step"])


def save(checkpoint: Path, model: LlamaForCausalLM, optimisers: Optimisers, step: int) -> None:
    """Save the whole state after `step`. An interruption leaves the previous file intact."""
    state = {"model": model.state_dict(), "optimisers": optimisers.state_dict(), "step": step}
    torch.save(state, checkpoint.with_suffix(".tmp"))
    checkpoint.with_suffix(".tmp").replace(checkpoint)


def train(
    model: LlamaForCausalLM,
    tokens: torch.Tensor,
    plan: TrainingPlan,
    loss_fn: LossFn,
    checkpoint: Path,
    name: str,
) -> None:
    """Train in place. Continues from an existing checkpoint, with the same result as without a pause."""
    device = next(model.parameters()).device
    optimisers = Optimisers.create(model, plan.muon_lr, plan.adamw_lr)
    first = resume(checkpoint, model, optimisers, name)
    data = tokens.numpy()
    started, running = time.monotonic(), 0.0
    for step in range(first, plan.steps):
        length = plan.length_at(step)
        batch = corpus.window(data, length, plan.tokens_per_step // length, plan.seed, step)
        windows = torch.from_numpy(batch).to(device)
        value = 0.0
        parts = windows.split(max(1, plan.tokens_per_pass // length))
        for part in parts:
            with autocast(device):
                logits = model(part[:, :-1], use_cache=False).logits
            loss = loss_fn(logits.float().flatten(0, 1), part) / len(parts)
            loss.backward()
            value += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step(schedule(step, plan.steps, plan.warmup, plan.decay_share))
        running = value if step == first else 0.95 * running + 0.05 * value
        if (step + 1) % 10 == 0:
            pace = (step + 1 - first) * plan.tokens_per_step / (time.monotonic() - started)
            print(f"{name}: step {step + 1}/{plan.steps} loss {running:.3f} {pace:.0f} tokens/s", flush=True)
        if (step + 1) % plan.checkpoint_every == 0 or step + 1 == plan.steps:
            save(checkpoint, model, optimisers, step + 1)
