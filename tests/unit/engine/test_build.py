"""Building a model for a worker: log lines, lengths, devices and errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from paceline import assets
from paceline.core.config import DraftConfig, TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.torch_backend import bytes_read
from paceline.engine.loading.build import build, build_vocabulary, choose_device
from paceline.engine.loading.model import random_model


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_weight_bytes_are_what_a_step_reads(threads: int) -> None:
    """One thread takes the compiled pass: matrices in 16 bits as in the checkpoint."""
    built = build(DraftConfig(model="embedded:draft", threads=threads, num_blocks=8))
    assert str(built.runner.dtype) == "torch.float32"
    model = built.loaded.model.config
    norms = (2 * model.num_hidden_layers + 1) * model.hidden_size
    if threads == 1:
        assert built.weight_bytes == 2 * (built.num_parameters - norms)
    else:
        assert built.weight_bytes == 4 * built.num_parameters


def longest(role: str) -> int:
    config: Any = AutoConfig.from_pretrained(assets.resolve(f"embedded:{role}"))
    return int(config.max_position_embeddings)


def test_each_long_step_is_logged_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline.steps")
    build(TargetConfig(model="embedded:draft", threads=1, num_blocks=8))
    told = [r.getMessage().split()[0] for r in caplog.records if r.name == "paceline.steps"]
    assert [word for word in told if word != "compiling"] == ["loading", "comparing", "making"]


def test_a_length_beyond_the_models_is_refused() -> None:
    own = longest("target")
    with pytest.raises(InvalidArgumentError, match=rf"at most {own}, .* got {own + 1}$") as refused:
        build(TargetConfig(model="embedded:target", threads=1, num_blocks=8, max_model_len=own + 1))
    assert refused.value.field == "max_model_len"
    built = build(TargetConfig(model="embedded:target", threads=1, num_blocks=own // 16, max_model_len=own))
    assert built.max_model_len == own


def test_a_draft_may_be_shorter_than_requested(caplog: pytest.LogCaptureFixture) -> None:
    own = longest("draft")
    with caplog.at_level(logging.WARNING):
        built = build(
            DraftConfig(model="embedded:draft", threads=1, num_blocks=own // 16, max_model_len=2 * own)
        )
    assert built.max_model_len == own
    assert f"embedded:draft drafts for sequences of up to {own} tokens only, not {2 * own}" in caplog.messages


def test_a_cache_that_limits_the_length_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built = build(DraftConfig(model="embedded:draft", threads=1, num_blocks=8))
    assert built.max_model_len == 8 * 16
    assert "sequences of embedded:draft are up to 128 tokens long: its cache holds no more" in caplog.messages


def test_a_vocabulary_alone_equals_the_models() -> None:
    config = DraftConfig(model="embedded:draft", threads=1, num_blocks=longest("draft") // 16)
    whole, alone = build(config), build_vocabulary(config)
    assert (alone.runner, alone.loaded.model, alone.pool) == (None, None, None)
    for name in ("vocab_size", "eos_token_ids", "max_model_len", "fingerprint"):
        assert getattr(alone.loaded, name) == getattr(whole.loaded, name)
    assert alone.max_model_len == whole.max_model_len


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_counts_if_it_is_the_head(tied: bool) -> None:
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    model = random_model(LlamaConfig(**shape, num_attention_heads=4, tie_word_embeddings=tied))
    parameters = sum(p.numel() for p in model.parameters())
    assert bytes_read(model) == 4 * (parameters - (0 if tied else 97 * 64))


@pytest.mark.parametrize(("name", "made_current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_the_device_is_made_current_before_loading(
    name: str, made_current: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and events are of the current device, whatever device their tensors are on."""
    calls: list[str] = []

    def load_model(*_: Any, **__: Any) -> Any:
        raise InvalidArgumentError("model", "is not loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    monkeypatch.setattr("paceline.engine.loading.build.load_model", load_model)
    with pytest.raises(InvalidArgumentError, match="is not loaded"):
        build(TargetConfig(model="embedded:target", device=name))
    assert calls == made_current


@pytest.mark.parametrize(("name", "told"), [("cuda", [False]), ("cuda:1", [False]), ("cpu", [])])
def test_attention_on_cuda_does_not_use_cudnn(
    name: str, told: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN makes and keeps a plan for every shape."""
    calls: list[bool] = []

    def load_model(*_: Any, **__: Any) -> Any:
        raise InvalidArgumentError("model", "is not loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    monkeypatch.setattr("paceline.engine.loading.build.load_model", load_model)
    with pytest.raises(InvalidArgumentError, match="is not loaded"):
        build(TargetConfig(model="embedded:target", device=name))
    assert calls == told


@pytest.mark.parametrize("step", ["load_model", "make_runner"])
def test_a_full_device_is_reported_with_remedies(step: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(f"paceline.engine.loading.build.{step}", no_room)
    with pytest.raises(InvalidArgumentError) as refused:
        build(TargetConfig(model="embedded:draft", device="cpu", threads=1))
    assert refused.value.field == "num_blocks"
    for said in ("cpu has no room for embedded:draft", "another process", "--num-blocks", "--device cuda:1"):
        assert said in refused.value.description


@pytest.mark.parametrize(
    ("cuda", "why"),
    [("13.0", "the driver may be too old for torch's CUDA 13.0"), (None, "this torch has no CUDA")],
)
def test_a_missing_cuda_device_is_reported_with_the_cause(
    cuda: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may be too old."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    with pytest.raises(InvalidArgumentError, match=why) as refused:
        choose_device("cuda")
    assert refused.value.field == "device"


@pytest.mark.parametrize(("name", "there"), [("cuda", True), ("cuda:1", True), ("cuda:2", False)])
def test_a_missing_device_is_named(name: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if there:
        assert choose_device(name) == torch.device(name)
        return
    with pytest.raises(InvalidArgumentError, match="there are 2 CUDA devices") as refused:
        choose_device(name)
    assert refused.value.field == "device"
