"""Attention in place on the pretended device, by a stand-in for its kernel: whole workers, and its choice."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.tiers import mostly_full
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.cache_attention import varlen
from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.loading import attention_choice
from paceline.engine.loading.model import make_runner, prepare, random_model
from paceline.engine.runner import ModelRunner
from tests.cuda import rounds
from tests.cuda.device import CPU, PretendedCuda
from tests.cuda.rounds import KINDS, Kind, play, script_of
from tests.cuda.test_recordings import check_alike
from tests.cuda.test_rounds import alike_ahead
from tests.cuda.workers import BLOCK_SIZE, Models, models_on, new_runner
from tests.unit.engine.runners import captured_of
from tests.unit.engine.test_runner import CONFIGS
from tests.unit.engine.varlen_kernel import kernel_on_cpu

DEVICE = torch.device("cuda:1")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of the kernel, which here takes 32 bits and small blocks, so that tokens equal those of a CPU."""
    monkeypatch.setattr(varlen, "_DTYPES", {torch.float32, torch.bfloat16})
    with kernel_on_cpu(BLOCK_SIZE) as calls:
        yield calls


def attention_of(runner: ModelRunner) -> CacheAttention:
    return captured_of(runner)._attention


def varlen_models(device: torch.device) -> Models:
    return models_on(device) if device == CPU else models_on(device, "varlen")


@pytest.mark.parametrize("kind", mostly_full(KINDS, count=8), ids=lambda kind: kind.name)
def test_a_round_in_place_answers_as_a_cpu(
    cuda: PretendedCuda, calls: list[int], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "models_on", varlen_models)
    models = varlen_models(DEVICE)
    calls.clear()
    played, _ = play(kind, cuda, DEVICE)
    for i, (mine, right) in enumerate(zip(played, script_of(kind), strict=True)):
        assert mine.answers == right.answers, f"round {i}"
        assert alike_ahead(mine, right), f"round {i}"
    for runner in (models.target, models.draft):
        assert captured_of(runner).usable
        assert attention_of(runner).in_place
    # Sequences with trees are gathered, prompts that are read with a tree included.
    assert calls or kind.tree


@pytest.mark.parametrize("family", mostly_full(CONFIGS, count=2))
def test_a_family_records_in_place_or_is_gathered(cuda: PretendedCuda, calls: list[int], family: str) -> None:
    """A softcap and unusual heads are gathered; both have the logits of a CPU."""
    runner = new_runner(random_model(CONFIGS[family](), seed=1), DEVICE, attention_backend="auto")
    recorded = captured_of(runner).num_recorded
    calls.clear()
    check_alike(family, runner)
    assert captured_of(runner).usable
    assert captured_of(runner).num_recorded > recorded
    layers = runner.cache.layers
    expected = varlen.reason_against(layers, torch.bfloat16, DEVICE) is None
    assert attention_of(runner).in_place == bool(calls) == expected


def runner_in_16_bits(attention_backend: str, block_size: int | None = None) -> ModelRunner:
    model: Any = random_model(CONFIGS["llama"](), seed=1, dtype=torch.bfloat16)
    return make_runner(
        prepare(model.to(DEVICE)),
        num_blocks=4,
        block_size=block_size,
        backends=("torch", "fused_eager"),
        attention_backend=attention_backend,
    )


def test_blocks_have_the_size_that_the_kernel_needs(cuda: PretendedCuda) -> None:
    with kernel_on_cpu():
        assert runner_in_16_bits("auto").cache.block_size == varlen.BLOCK
        assert runner_in_16_bits("gathered").cache.block_size == 16
        assert runner_in_16_bits("auto", 16).cache.block_size == 16, "gathered, by the trial"
        with pytest.raises(InvalidArgumentError, match=r"^attention_backend: varlen fails .* blocks of 16"):
            runner_in_16_bits("varlen", 16)


def test_a_device_without_the_kernel_gathers(cuda: PretendedCuda, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert runner_in_16_bits("auto").cache.block_size == 16
    assert "attention in place fails on this device" in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"^attention_backend: varlen fails on this device"):
        runner_in_16_bits("varlen")


def test_wrong_logits_in_place_are_gathered_or_refused(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault that the trial did not see."""
    inner = varlen.varlen_attn

    @functools.wraps(inner)
    def wrong(query: Tensor, *args: Any, **more: Any) -> Any:
        return inner(query, *args, **more | {"window_size": (2, 0)})

    monkeypatch.setattr(attention_choice, "error_in_trial", lambda *_: None)
    monkeypatch.setattr(varlen, "varlen_attn", wrong)
    with kernel_on_cpu(), caplog.at_level(logging.WARNING):
        runner = runner_in_16_bits("auto")
        with pytest.raises(InvalidArgumentError, match=r"^model: .*gives other logits"):
            runner_in_16_bits("varlen")
    assert "with attention in place, " in caplog.text
    assert runner.backend.recordable is not None
    assert runner.backend.recordable.attention is GATHERED
