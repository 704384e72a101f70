"""Training of drafts on the target's own text, and conversion of one wide layer to two narrow layers.

A single attention layer cannot look up what followed an earlier occurrence of a token. That takes one layer
that knows the previous token and another that searches for it (Olsson et al. 2022, "In-context learning and
induction heads"). Source code is repetitive, and the text of a small target even more so.
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
"""First batches of the record, which are not used for training."""


@dataclass(frozen=True, slots=True)
class DeepeningPlan:
    """Length of the training and amount of data."""

    steps: int = 3000
    seed: int = 30
    rows: int = 4
    """Rows of each of the `passes` in a step, all from one batch."""
    passes: int = 4
    steps_a_batch: int = 10
    """Number of steps after which a batch is added, so that no text is seen often."""
    divergence_weight: float = 0.3
    """Weight of KL(p, q) in addition to the total variation, whose gradient vanishes where q is close to
    0."""
    muon_lr: float = 0.015
    adamw_lr: float = 0.0015
    warmup: int = 30
    decay_share: float = 0.6
    checkpoint_every: int = 100

    def batches_at(self, step: int) -> int:
        """Number of batches available at this step."""
        return HELD_BACK + 4 + step // self.steps_a_batch


def deepened(wide: LlamaForCausalLM, config: LlamaConfig, text: Tensor, seed: int) -> LlamaForCausalLM:
    """`wide` with its most active neurons on `text` [B, L], and a second layer that initially does
    nothing."""
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
    """Train in place on the record's distributions. Continues from an existing checkpoint."""
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
    """Means of KL(p, q) and of the total variation between p and q over the recorded positions."""
    device = next(draft.parameters()).device
    ours = draft(torch.from_numpy(tokens[:, :-1]).to(device), use_cache=False).logits[:, -NEW_TOKENS:]
    log_q = ours.flatten(0, 1).log_softmax(-1)
    log_p = torch.from_numpy(np.array(logits)).to(device).float().flatten(0, 1).log_softmax(-1)
    divergence = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return divergence, (log_p.exp() - log_q.exp()).abs().sum(-1).mean() / 2
