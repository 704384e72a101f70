"""Distillation of the target's distributions into the draft, on the corpus and on the target's own text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from paceline.assets.training import corpus
from paceline.assets.training.trainer import LossFn, autocast

PROMPT_TOKENS = 64
CONTINUATION_TOKENS = 448
BATCH = 64


def start_from(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> LlamaForCausalLM:
    """Copy the target's embeddings, which have the same width and are half of the draft."""
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        draft.model.norm.weight.copy_(target.model.norm.weight)
    return draft


def written_by(
    target: LlamaForCausalLM,
    prompts: torch.Tensor,
    batches: int,
    seed: int,
    cache: Path,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Continuations of random windows of `prompts`, flat int64, sampled at `temperature` (0: greedy).

    A draft only has to predict such text. Each batch is stored in `cache`, so that an interrupted run
    continues where it stopped.
    """
    pieces = []
    device = next(target.parameters()).device
    for index in range(batches):
        file = cache / f"written-{seed}-{temperature}-{index}.npy"
        if not file.exists():
            windows = corpus.window(prompts.numpy(), PROMPT_TOKENS - 1, BATCH, seed, index)
            torch.manual_seed(seed + index)
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0}
                if temperature
                else {"do_sample": False}
            )
            with torch.no_grad(), autocast(device):
                text = target.generate(
                    torch.from_numpy(windows).to(device),
                    max_new_tokens=CONTINUATION_TOKENS,
                    min_new_tokens=CONTINUATION_TOKENS,
                    pad_token_id=corpus.END_OF_TEXT_ID,
                    **sampling,
                )
            np.save(file, text.cpu().numpy())
            print(f"wrote batch {index + 1}/{batches}", flush=True)
        pieces.append(torch.from_numpy(np.load(file)).flatten())
    return torch.cat(pieces)


def imitation_loss(target: LlamaForCausalLM) -> LossFn:
    """KL(p, q) plus the total variation between p and q.

    The acceptance rate of rejection sampling is 1 - TV (Leviathan et al., 3.5).
    """
    device = next(target.parameters()).device

    def loss(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), autocast(device):
            log_p = target(windows[:, :-1], use_cache=False).logits.float().flatten(0, 1).log_softmax(-1)
        log_q = logits.log_softmax(-1)
        divergence = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        variation = (log_p.exp() - log_q.exp()).abs().sum(-1).mean() / 2
        return divergence + variation

    return loss
