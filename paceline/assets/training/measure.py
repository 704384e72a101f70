"""Measures how well the draft predicts the target, on held-out text continued by the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Agreement:
    """Acceptance rates, averaged over positions of the target's text."""

    greedy: float
    """Share of positions where both argmaxes agree: alpha at temperature 0."""
    rejection: float
    """Mean of sum min(p, q): alpha at temperature 1."""
    coupled: float
    """Mean of sum_v 1 / sum_w max(p_w/p_v, q_w/q_v): alpha at temperature 1 (Daliri et al.)."""
    positions: int


def agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: torch.Tensor, skip: int
) -> Agreement:
    """Compare both models on `windows` [B, L], except the first `skip` positions (the prompt)."""
    same = overlap = coupled = 0.0
    count = 0
    with torch.no_grad():
        for part in windows.split(8):
            p = target(part, use_cache=False).logits[:, skip:].float().softmax(-1).flatten(0, 1)
            q = draft(part, use_cache=False).logits[:, skip:].float().softmax(-1).flatten(0, 1)
            same += (p.argmax(-1) == q.argmax(-1)).sum().item()
            overlap += torch.minimum(p, q).sum().item()
            coupled += sum(_coupled(a, b) for a, b in zip(p[::16], q[::16], strict=True)) * 16
            count += len(p)
    return Agreement(same / count, overlap / count, coupled / count, count)


def _coupled(p: torch.Tensor, q: torch.Tensor, keep: int = 256) -> float:
    """The formula on the most likely tokens; omitting the others only lowers the sum."""
    top = torch.maximum(p, q).topk(keep).indices
    a, b = p.clamp(min=1e-12), q.clamp(min=1e-12)
    ratios = torch.maximum(a[None, :] / a[top, None], b[None, :] / b[top, None])
    return float((1 / ratios.sum(1)).sum())
