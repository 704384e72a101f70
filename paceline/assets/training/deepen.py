"""Drafts that learn from what their target wrote, and the first of them: two narrow layers of one wide layer.

A single layer of attention cannot look up what followed the last time that something stood there: that takes
one layer that knows which token came before, and another that looks for it (Olsson et al. 2022, "In-context
learning and induction heads"). Source code repeats itself, and what a small target writes even more so.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.assets.training.models import Muon, Optimisers, enlarged, schedule
from paceline.assets.training.record import NEW_TOKENS, SEQUENCES, BatchArchive
from paceline.assets.training.trainer import autocast, resume, save

HELD_BACK = 4
"""The first batches of the record, which nobody learns from."""


@dataclass(frozen=True, slots=True)
class DeepeningPlan:
    """How long to learn, and from how much."""

    steps: int = 3000
    seed: int = 30
    rows: int = 4
    """Of each of the `passes` in a step; each pass takes them from one batch."""
    passes: int = 4
    steps_a_batch: int = 10
    """There is a new batch to learn from every so many steps, so that no text is seen often."""
    divergence_weight: float = 0.3
    """Of KL(p, q) beside the total variation. It moves what q has all but lost, where that has no slope."""
    muon_lr: float = 0.015
    adamw_lr: float = 0.0015
    warmup: int = 30
    decay_share: float = 0.6
    checkpoint_every: int = 100

    def batches_at(self, step: int) -> int:
        """Batches to learn from."""
        return HELD_BACK + 4 + step // self.steps_a_batch


def deepened(wide: LlamaForCausalLM, config: LlamaConfig, text: Tensor, seed: int) -> LlamaForCausalLM:
    """`wide`, with the neurons that do most on `text` [B, L], and a layer above it that does nothing yet."""
    narrow = deepcopy(wide)
    mlp = narrow.model.layers[0].mlp
    activity: list[Tensor] = []
    hook = mlp.down_proj.register_forward_hook(lambda _, given, __: activity.append(given[0]))
    with torch.no_grad():
        narrow(text, use_cache=False)
        hook.remove()
        strength = activity[0].flatten(0, 1).pow(2).mean(0).sqrt() * mlp.down_proj.weight.norm(dim=0)
        kept = strength.topk(config.intermediate_size).indices.sort().values
        mlp.gate_proj.weight.data = mlp.gate_proj.weight[kept]
        mlp.up_proj.weight.data = mlp.up_proj.weight[kept]
        mlp.down_proj.weight.data = mlp.down_proj.weight[:, kept]
    return enlarged(narrow, config, seed)


def train_on(record: BatchArchive, draft: LlamaForCausalLM, plan: DeepeningPlan, checkpoint: Path) -> None:
    """Learn the record's distributions, in place. An existing checkpoint is continued from."""
    optimisers = Optimisers.create(draft, plan.muon_lr, plan.adamw_lr, Muon)
    first = resume(checkpoint, draft, optimisers, "deeper draft")
    running = 1.0
    for step in range(first, plan.steps):
        rng = np.random.default_rng((plan.seed, step))
        places = [
            (
                HELD_BACK + int(rng.integers(0, plan.batches_at(step) - HELD_BACK)),
                int(rng.integers(0, SEQUENCES - plan.rows + 1)),
            )
            for _ in range(plan.passes)
        ]
        lost = 0.0
        for index, row in places:
            tokens, logits = record.batch(index)
            rows = slice(row, row + plan.rows)
            with autocast(next(draft.parameters()).device):
                divergence, variation = _distances(draft, tokens[rows], logits[rows])
            ((plan.divergence_weight * divergence + variation) / plan.passes).backward()
            lost += variation.item() / plan.passes
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimisers.step(schedule(step, plan.steps, plan.warmup, plan.decay_share))
        running = lost if step == first else 0.98 * running + 0.02 * lost
        if (step + 1) % plan.checkpoint_every == 0 or step + 1 == plan.steps:
            print(f"deeper draft: step {step + 1}/{plan.steps} total variation {running:.4f}", flush=True)
            save(checkpoint, draft, optimisers, step + 1)


def _distances(
    draft: LlamaForCausalLM, tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]], logits: np.ndarray
) -> tuple[Tensor, Tensor]:
    """KL(p, q) and the total variation between p and q, means over the recorded positions."""
    device = next(draft.parameters()).device
    ours = draft(torch.from_numpy(tokens[:, :-1]).to(device), use_cache=False).logits[:, -NEW_TOKENS:]
    log_q = ours.flatten(0, 1).log_softmax(-1)
    log_p = torch.from_numpy(np.array(logits)).to(device).float().flatten(0, 1).log_softmax(-1)
    divergence = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return divergence, (log_p.exp() - log_q.exp()).abs().sum(-1).mean() / 2
