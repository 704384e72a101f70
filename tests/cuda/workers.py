"""Both workers with tiny random Llama models, on a CPU or on a pretended CUDA device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaConfig

from draft_worker.drafters.model import ModelDrafter
from draft_worker.engine import DraftEngine
from paceline.core.clock import ManualClock
from paceline.core.config import DraftConfig, TargetConfig
from paceline.engine.loading.build import _recorders
from paceline.engine.loading.measuring import PeakLoad
from paceline.engine.loading.model import make_runner, prepare, random_model
from paceline.engine.runner import ModelRunner
from target_worker.engine import TargetEngine
from tests.cuda.device import CPU
from tests.unit.grammar.tiny import END, VOCAB, grammars

MAX_LEN: Final = 128
NUM_BLOCKS: Final = 128
BLOCK_SIZE: Final = 16
SMALL: Final = PeakLoad(rows=64, sequences=8)
DISTANCE: Final = 0.03
"""What the draft's weights differ by from the target's: some draft tokens are accepted, and some are not."""


@dataclass(frozen=True)
class Models:
    """One device's runners of a target and of a draft."""

    target: ModelRunner
    draft: ModelRunner


@functools.cache
def models_on(device: torch.device, attention_backend: str = "gathered") -> Models:
    """To be called with the pretended device entered, unless it is a CPU."""
    runners = (
        new_runner(model, device, attention_backend=attention_backend)
        for model in (target_model(), draft_model())
    )
    return Models(*runners)


def target_model() -> Any:
    """The target's weights on a CPU."""
    return _llama()


def draft_model() -> Any:
    """The draft's."""
    return _llama(DISTANCE)


def _llama(distance: float = 0.0) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
    )
    model = random_model(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for weight in model.parameters() if distance else ():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=distance)
    return model


def new_runner(
    model: Any,
    device: torch.device,
    *,
    num_blocks: int | None = NUM_BLOCKS,
    share: float | None = None,
    load: PeakLoad = SMALL,
    attention_backend: str = "gathered",
) -> ModelRunner:
    """A runner as a worker makes it: recorded by what records on a CUDA device."""
    if device == CPU:
        return make_runner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return make_runner(
        prepare(model.to(device)),
        num_blocks=num_blocks,
        memory_share=share,
        load=load,
        block_size=BLOCK_SIZE,
        backends=("torch", "fused_eager"),
        attention_backend=attention_backend,
        new_recorder=_recorders(device),
    )


def target_engine(models: Models, *, structured: bool = False) -> TargetEngine:
    """A target worker without sockets."""
    config = TargetConfig(model="random", prefix_cache=False)
    return TargetEngine(models.target, config, **_common(structured))


def draft_engine(models: Models, *, structured: bool = False, branches: int = 0) -> DraftEngine:
    """A draft worker without sockets."""
    config = DraftConfig(model="random", prefix_cache=False, lookahead_branches=branches)
    common = _common(structured)
    return DraftEngine(ModelDrafter(models.draft, config, common["clock"]), config, **common)


def _common(structured: bool) -> dict[str, Any]:
    return {
        "vocabulary_size": VOCAB,
        "max_model_len": MAX_LEN,
        "eos_token_ids": (END,) if structured else (),
        "grammars": grammars() if structured else None,
        "clock": ManualClock(),
    }
