"""Random models on the device, and their runners: launched, and recorded on the same cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.engine.backends.captured import CapturedBackend, Recorder, room_for_logits
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import PagedCache
from paceline.engine.loading.model import make_runner, prepare
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable
from tools.gpu_check.device import Device
from tools.gpu_check.report import Skipped
from tools.gpu_check.sizes import BLOCK_SIZE, Shape, Sizes

_CACHE_SHARE: Final = 0.8
"""Share of the free memory that a cache may take; the rest is for recordings, gathers and judging."""
_LOGITS: Final = 1.28
"""Standard deviation of logits: as of 8B shapes with the usual weights."""
_LATE: Final = 0.1
"""Factor of what the layers behind a draft's add, so that the draft often guesses the target's token."""


def config_of(shape: Shape) -> LlamaConfig:
    """A Llama of this shape without special tokens."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.neurons,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.longest,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=_LOGITS * shape.hidden**-0.5,
        tie_word_embeddings=False,
    )


def new_model(device: Device, shape: Shape, dtype: torch.dtype) -> Any:
    """Random weights, made on the device."""
    torch.manual_seed(1)
    auto: Any = AutoModelForCausalLM
    # The pretended device does not make the tensors of a whole model.
    with contextlib.nullcontext() if device.pretended else device.torch:
        model = auto.from_config(config_of(shape), dtype=dtype)
    return prepare(model.to(device.torch))


def new_pair(device: Device, shape: Shape, draft_layers: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """A target, and a draft that consists of its first layers."""
    target = new_model(device, shape, dtype)
    with torch.inference_mode():
        for layer in target.model.layers[draft_layers:]:
            layer.self_attn.o_proj.weight.mul_(_LATE)
            layer.mlp.down_proj.weight.mul_(_LATE)
    draft = new_model(device, replace(shape, layers=draft_layers), dtype)
    draft.load_state_dict(target.state_dict(), strict=False)
    return target, draft


@dataclass(frozen=True, slots=True)
class Recorded:
    """A runner whose passes are recorded."""

    runner: ModelRunner
    captured: CapturedBackend
    """Its recordings."""


@dataclass(frozen=True, slots=True)
class Runners:
    """One model's runners on one cache."""

    launched: ModelRunner
    room: torch.Tensor
    """Where recorded passes leave their logits."""

    @property
    def entry_bytes(self) -> float:
        """Bytes of the cache for one token."""
        cache = self.launched.cache
        return cache.bytes_per_block / cache.block_size

    def recording(self, recorder: Recorder) -> Recorded:
        """A runner on the same model and cache without recordings yet. Raises Skipped if none can be made."""
        runner = self.launched
        recordable = runner.backend.recordable
        if recordable is None:
            raise Skipped(f"the backend {type(runner.backend).__name__} records nothing")
        captured = CapturedBackend(
            runner.backend,
            recordable,
            runner.cache,
            recorder,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            room=self.room,
        )
        return Recorded(ModelRunner(runner.model, runner.cache, captured), captured)


def runners_of(device: Device, model: Any, num_entries: int, share: float = _CACHE_SHARE) -> Runners:
    """A model on a cache of `num_entries`, or of as many as fit into a share of the free memory."""
    text = model.config
    width = (
        2 * text.num_hidden_layers * text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
    )
    fits = int(device.free_bytes() * share) // (width * model.dtype.itemsize)
    blocks = max(1, min(num_entries, fits) // BLOCK_SIZE)
    launched = make_runner(model, num_blocks=blocks, block_size=BLOCK_SIZE, backends=BACKENDS)
    with torch.inference_mode():
        for entries in launched.cache.entries:
            entries.normal_()  # memory that was never written may hold NaN
    return Runners(launched, room_for_logits(launched.vocab_size, launched.dtype, device.torch))


def runners_of_cells(device: Device, sizes: Sizes, shape: Shape) -> Runners:
    """A new model on a cache for the most sequences of the most keys, with room for their new tokens."""
    most = max(sizes.sequences) * (max(sizes.keys) + 64)
    return runners_of(device, new_model(device, shape, sizes.dtype), most)


def tables_of(runner: ModelRunner, count: int, length: int, room: int) -> list[BlockTable]:
    """Tables of `length` entries, which hold random numbers, with room for more.

    Raises Skipped where the cache cannot hold them.
    """
    cache: PagedCache = runner.cache
    needed = count * -(-(length + room) // cache.block_size)
    if needed > cache.pool.free_blocks:
        have = cache.pool.free_blocks * cache.block_size
        raise Skipped(
            f"needs a cache of {needed * cache.block_size:,} entries; {have:,} fit beside the model"
        )
    tables = [runner.new_table() for _ in range(count)]
    for table in tables:
        table.reserve(length)
        table.commit(length)
    return tables


def reference_of(device: Device, shape: Shape, model: Any) -> Any:
    """A copy of `model` in float32 with transformers' own attention."""
    other = new_model(device, shape, torch.float32)
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("eager")
    return other
