"""Passes recorded as CUDA graphs against passes that are launched one by one, on the same device."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.decoding.noise import CoupledNoise, gumbel
from paceline.engine.backends.attention import inspect_attention
from paceline.engine.backends.captured import PATIENCE, ROWS, CudaGraphs
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import PagedCache
from paceline.engine.device import keep_attention_from_cudnn, make_current
from paceline.engine.layout import BranchInput, SequenceInput
from paceline.engine.loading.build import _recorders
from paceline.engine.loading.model import load_model, make_runner
from paceline.engine.multi_step import ChainInput
from paceline.engine.runner import ModelRunner
from paceline.kv import Branching
from tests.unit.engine.runners import captured_of, recording_runner, runner_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[0, 1], ids=["first device", "second device"])
def cuda(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The current device, which is not always the one that threads begin on."""
    if request.param >= torch.cuda.device_count():
        pytest.skip("no such CUDA device")
    made_current = torch.device("cuda", request.param)
    make_current(made_current)
    keep_attention_from_cudnn(made_current)
    yield made_current
    make_current(torch.device("cuda", 0))


@pytest.fixture
def runners(request: pytest.FixtureRequest, cuda: torch.device) -> tuple[ModelRunner, ModelRunner]:
    """The embedded target without and with recordings: by one backend, of a dtype."""
    from paceline import assets

    name, dtype = request.param
    model: Any = load_model(assets.path("target"), device=cuda, dtype=dtype).model
    layers = inspect_attention(model)
    made = []
    for recorder in (None, CudaGraphs(cuda)):
        cache = PagedCache(layers, num_blocks=512, dtype=model.dtype, device=cuda)
        made.append(
            runner_of(model, cache, name)
            if recorder is None
            else recording_runner(model, cache, recorder, name)
        )
    return made[0], made[1]


NAMES = ["torch", "fused_eager"]
FLOAT32 = [pytest.param((name, "float32"), id=name) for name in NAMES]
BFLOAT16 = [pytest.param((name, "bfloat16"), id=f"{name} in 16 bits") for name in NAMES]


def close(runner: ModelRunner, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Each row; of 16 bits as far apart as a runner's may be from transformers'."""
    if runner.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)
        return
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert bool((error < 0.2).all()), error


@pytest.mark.parametrize("runners", [*FLOAT32, *BFLOAT16], indirect=True)
def test_captured_batches_equal_eager(runners: tuple[ModelRunner, ModelRunner]) -> None:
    rng = random.Random(1)
    tables = [[runner.new_table() for _ in range(6)] for runner in runners]
    for _ in range(30):
        chosen = sorted(rng.sample(range(6), rng.choice([1, 3, 4, 6])))
        fed = [[rng.randrange(2048) for _ in range(rng.choice([1, 5]))] for _ in chosen]
        kept = [rng.randint(0, len(tokens)) for tokens in fed]
        logits = []
        for runner, own in zip(runners, tables, strict=True):
            lengths = [own[i].length for i in chosen]
            inputs = [SequenceInput(own[i], f, len(f)) for i, f in zip(chosen, fed, strict=True)]
            logits.append(runner.forward(inputs))
            for i, length, k in zip(chosen, lengths, kept, strict=True):
                own[i].truncate_to(length + k)
        close(runners[0], logits[1], logits[0])
    captured = captured_of(runners[1])
    assert captured.usable
    assert captured.num_recorded >= 3


@pytest.mark.parametrize("runners", [*FLOAT32, *BFLOAT16], indirect=True)
def test_captured_branches_equal_eager(runners: tuple[ModelRunner, ModelRunner]) -> None:
    rng = random.Random(2)
    prefix = [rng.randrange(2048) for _ in range(40)]
    regions = []
    for runner in runners:
        table = runner.new_table()
        runner.forward([SequenceInput(table, prefix, 0)])
        region = Branching(table, 64)
        regions.append([region.branch(kept) for kept in (40, 39, 37)])
    for _ in range(6):
        tokens = [rng.randrange(2048) for _ in range(3)]
        logits = [
            runner.forward_branches([BranchInput(b, t) for b, t in zip(own, tokens, strict=True)])
            for runner, own in zip(runners, regions, strict=True)
        ]
        close(runners[0], logits[1], logits[0])


@pytest.mark.parametrize("runners", FLOAT32, indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_chains_equal_single_passes(
    runners: tuple[ModelRunner, ModelRunner], temperature: float
) -> None:
    """K tokens of each sequence in one replay are those of K passes."""
    plain, recorded = runners
    rng = random.Random(3)
    prompts = [[rng.randrange(2048) for _ in range(n)] for n in (3, 17, 60)]
    chains = []
    for _ in range(1 + PATIENCE):
        tables = [recorded.new_table() for _ in prompts]
        for table, prompt in zip(tables, prompts, strict=True):
            recorded.forward([SequenceInput(table, prompt[:-1], 0)])
        noises = [
            CoupledNoise(2**63 + i, len(prompt)) if temperature else None for i, prompt in enumerate(prompts)
        ]
        chains = recorded.forward_chains(
            [
                ChainInput(table, prompt[-1:], 4, temperature, noise, num_others=3)
                for table, prompt, noise in zip(tables, prompts, noises, strict=True)
            ]
        )
        for table in tables:
            table.free()
    for i, (prompt, chain) in enumerate(zip(prompts, chains, strict=True)):
        table, text = plain.new_table(), list(prompt)
        plain.forward([SequenceInput(table, text[:-1], 0)])
        for step in range(4):
            row = plain.forward([SequenceInput(table, text[-1:], 1)])[0].double().cpu()
            if temperature:
                row = row / temperature + gumbel([2**63 + i], [len(prompt) + step], 2048)[0]
            best = row.topk(4).indices.tolist()
            assert chain.token_ids[step] == best[0]
            assert set(chain.others[step]) == set(best[1:])
            text.append(best[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_records_after_its_comparison(cuda: torch.device, dtype: str) -> None:
    """What was recorded to compare it is gone, and with it that memory; what comes then is recorded all the
    same. All recordings leave their logits in one place."""
    from paceline import assets

    loaded = load_model(assets.path("target"), device=cuda, dtype=dtype)
    runner = make_runner(loaded, num_blocks=512, backends=BACKENDS, new_recorder=_recorders(cuda))
    captured = captured_of(runner)
    assert captured.num_recorded == len(ROWS)
    gc.collect()
    torch.cuda.empty_cache()
    for count in (2, 3, 8):
        for _ in range(1 + PATIENCE):
            tables = [runner.new_table() for _ in range(count)]
            logits = runner.forward([SequenceInput(table, [1, 2, 3], 3) for table in tables])
            close(runner, logits, logits[:3].repeat(count, 1))
            for table in tables:
                table.free()
    assert captured.usable
    assert captured.num_recorded == len(ROWS) + 3
    places = {recording.replay().untyped_storage().data_ptr() for recording in captured._recorded.values()}
    assert len(places) == 1
