"""Shapes of the pair, and the optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.assets.enlarging import put_into
from paceline.assets.training.corpus import END_OF_TEXT_ID, VOCAB_SIZE

MAX_POSITIONS = 2048


def narrow_target_config(layers: int = 12) -> LlamaConfig:
    """The target's initial shape. Training its 6.6M parameters is three times as fast as training 21M."""
    return _config(hidden_size=256, intermediate_size=448, num_hidden_layers=layers)


def target_config() -> LlamaConfig:
    """21M parameters: 82 MiB in float32, larger than a last-level cache, so a step is memory-bound."""
    return _config(hidden_size=256, intermediate_size=2048, num_hidden_layers=12)


def wide_draft_config() -> LlamaConfig:
    """The draft's initial shape: one layer with as many weights as the later two (deepen.py)."""
    return _config(hidden_size=256, intermediate_size=640, num_hidden_layers=1)


def small_draft_config() -> LlamaConfig:
    """Two small layers, for the narrow target."""
    return _config(hidden_size=256, intermediate_size=256, num_hidden_layers=2)


def draft_config() -> LlamaConfig:
    """3.1M parameters: a step takes about a seventh of the target's."""
    return _config(hidden_size=256, intermediate_size=640, num_hidden_layers=4)


def _config(**shape: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **shape,
    )


def build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised float32 model; residual outputs are scaled down with depth."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            scale = (2 * config.num_hidden_layers) ** -0.5
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    return model


def grow(small: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A deeper model whose layers repeat the small one's stack (Du et al. 2024, depthwise stacking).

    Most of the training can then run on the small model.
    """
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
        model.model.norm.load_state_dict(small.model.norm.state_dict())
        for index, layer in enumerate(model.model.layers):
            layer.load_state_dict(small.model.layers[index % len(small.model.layers)].state_dict())
    return model


def enlarged(small: LlamaForCausalLM, config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """The same function in a larger shape, with more neurons per layer and more layers.

    Output weights of the new parts are zero, so they have no effect yet; input weights are random, so they
    can learn.
    """
    model = build(config, seed)
    with torch.no_grad():
        put_into(model, small)
    return model


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon in float32, because CPUs without bfloat16 take 25 times as long in it."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("momentum", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.05)
                update = _orthogonal(p.grad.lerp(mean, 0.95))
                p.mul_(1 - group["lr"] * 0.05)
                p.add_(update, alpha=-group["lr"] * max(1.0, p.size(0) / p.size(1)) ** 0.5)


def _orthogonal(gradient: Tensor) -> Tensor:
    """Five steps of the Newton-Schulz iteration (Jordan et al. 2024, "Muon")."""
    wide = gradient.T if gradient.size(0) > gradient.size(1) else gradient
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if gradient.size(0) > gradient.size(1) else x


@dataclass(slots=True)
class Optimisers:
    """Muon for the hidden matrices, AdamW for embeddings and norms, under one schedule."""

    muon: torch.optim.Optimizer
    adamw: torch.optim.Optimizer
    muon_lr: float
    adamw_lr: float

    @classmethod
    def create(
        cls,
        model: LlamaForCausalLM,
        muon_lr: float,
        adamw_lr: float,
        muon: Callable[[list[Tensor], float], torch.optim.Optimizer] | None = None,
    ) -> Optimisers:
        """`muon` constructs the optimiser for matrices; None takes torch's."""
        matrices: list[Tensor] = [
            p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n
        ]
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        if muon is None:
            muon = partial(torch.optim.Muon, momentum=0.95, weight_decay=0.05)
        return cls(
            muon(matrices, muon_lr),
            torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
            muon_lr,
            adamw_lr,
        )

    def step(self, factor: float) -> None:
        for optimiser, lr in ((self.muon, self.muon_lr), (self.adamw, self.adamw_lr)):
            for group in optimiser.param_groups:
                group["lr"] = lr * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def schedule(step: int, steps: int, warmup: int, decay_share: float) -> float:
    """Warm-up, plateau, then linear to zero over the last `decay_share` of the run."""
    decay_from = int(steps * (1 - decay_share))
    if step < warmup:
        return (step + 1) / warmup
    if step < decay_from:
        return 1.0
    return max(0.0, (steps - step) / (steps - decay_from))
