"""The cache's memory, and errors where it does not fit. The GPU is simulated."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from paceline import assets
from paceline.core.config import TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.attention import inspect_attention
from paceline.engine.cache import LayerLayout
from paceline.engine.cache_size import check_fits, num_blocks_on_cpu, numbers_per_position
from paceline.engine.loading import build as build_module
from paceline.engine.loading.model import load_model

CUDA = torch.device("cuda:0")
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which this process has 10 GiB of weights, and others 8 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (62 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10 * GIB)


def test_a_share_without_a_gpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert num_blocks_on_cpu((LayerLayout(2, 8, 8, None),), 16, torch.float32, 0.5) > 0
    assert "--gpu-memory-utilization applies to GPUs only" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_too_many_blocks_are_refused_with_the_maximum() -> None:
    check_fits(62, 16, GIB, CUDA)
    with pytest.raises(InvalidArgumentError) as refused:
        check_fits(63, 16, GIB, CUDA)
    assert refused.value.message == (
        "num_blocks: 63 blocks of 16 positions take 63.0 GiB, and cuda:0 has 62.0 GiB free: at most 62 fit"
    )


def test_a_too_large_cache_is_refused_before_loading_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(build_module, "load_model", load)
    config = TargetConfig(model="embedded:target", device="cpu", num_blocks=99_999_999, threads=1)
    with pytest.raises(InvalidArgumentError, match=r"99999999 blocks of 16 positions .* at most \d+ fit"):
        build_module.build(config)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_entry_size_matches_the_loaded_model(role: str) -> None:
    name = assets.resolve(f"embedded:{role}")
    layers = inspect_attention(load_model(name).model)
    config = AutoConfig.from_pretrained(name)
    assert numbers_per_position(config) == sum(layer.width for layer in layers)


def test_an_unknown_kind_of_entry_has_no_size() -> None:
    config = AutoConfig.from_pretrained(assets.resolve("embedded:draft"))
    config.kv_lora_rank = 4
    assert numbers_per_position(config) is None


def test_a_refusal_of_the_system_is_reported_like_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(build_module, "load_model", load)
    with pytest.raises(InvalidArgumentError, match="has no room for embedded:target") as refused:
        build_module.build(TargetConfig(model="embedded:target", device="cpu", threads=1))
    assert refused.value.field == "num_blocks"
