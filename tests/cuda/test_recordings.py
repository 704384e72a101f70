"""What records and what does not: families of models, and faults that are planted to be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.tiers import mostly_full
from torch import Tensor

from paceline.engine.backends.cache_attention import interface
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.layout import Indices, SequenceInput
from paceline.engine.loading.model import random_model
from paceline.engine.runner import ModelRunner
from tests.cuda.device import CPU, PretendedCuda
from tests.cuda.workers import new_runner
from tests.unit.engine.runners import captured_of
from tests.unit.engine.test_runner import CONFIGS

DEVICE = torch.device("cuda:1")


def made(family: str, device: torch.device = DEVICE) -> ModelRunner:
    return new_runner(random_model(CONFIGS[family](), seed=1), device)


def decoded(runner: ModelRunner) -> list[Tensor]:
    """Logits of two sequences' prompts, and of steps that are launched, recorded and replayed."""
    tables = [runner.new_table() for _ in range(2)]
    found = [runner.forward([SequenceInput(t, [2 + i, 3, 4 + i], 3) for i, t in enumerate(tables)])]
    for token in range(5, 9):
        found.append(runner.forward([SequenceInput(table, [token], 1) for table in tables]))
    return [logits.cpu() for logits in found]


def check_alike(family: str, runner: ModelRunner) -> None:
    for mine, right in zip(decoded(runner), decoded(made(family, CPU)), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", mostly_full(CONFIGS, count=3))
def test_a_family_records_and_replays(cuda: PretendedCuda, family: str) -> None:
    runner = made(family)
    recorded = captured_of(runner).num_recorded
    check_alike(family, runner)
    assert captured_of(runner).usable
    assert captured_of(runner).num_recorded > recorded


def test_a_replayed_pass_is_three_launches(cuda: PretendedCuda) -> None:
    """Its inputs, the recording, and a copy of the logits that the next replay leaves alone."""
    runner = made("llama")
    decoded(runner)
    table = runner.new_table()
    for _ in range(3):
        with cuda.counting() as counts:
            runner.forward([SequenceInput(table, [3], 1)])
        cuda.waits_so_far += 1  # somebody reads the logits
    assert (counts.launches, counts.num_waits) == (3, 0)


@pytest.mark.planted
def test_a_tensor_left_on_the_host_is_seen(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(array: Indices, device: torch.device) -> Tensor:
        return torch.from_numpy(array)

    runner = made("llama")
    monkeypatch.setattr(interface, "array_to_device", left)
    with pytest.raises(RuntimeError, match="same device"):
        decoded(runner)


@pytest.mark.planted
def test_a_number_kept_in_a_recording_is_seen(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait and no other device, but a replay has the positions of the pass that was recorded."""
    inner = StaticInputs.batch

    def keeps(inputs: StaticInputs, ids: Tensor, positions: Tensor) -> RaggedBatch:
        return inner(inputs, ids, torch.full_like(positions, int(inputs._positions[0, 0])))

    runner = made("llama")
    monkeypatch.setattr(StaticInputs, "batch", keeps)
    with pytest.raises(AssertionError, match="not close"):
        check_alike("llama", runner)
    assert captured_of(runner).usable


@pytest.mark.planted
@pytest.mark.parametrize("fault", [lambda t: t.cpu(), lambda t: t.to("cuda:0")], ids=["host", "other"])
def test_weights_elsewhere_are_seen(cuda: PretendedCuda, fault: Callable[[Any], Any]) -> None:
    model: Any = random_model(CONFIGS["llama"](), seed=1).to(DEVICE)
    norm = model.model.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(fault(norm.weight), requires_grad=False)
    with pytest.raises(RuntimeError, match="same device"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), use_cache=False)
