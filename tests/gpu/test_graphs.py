"""Passes recorded as CUDA graphs against passes that are launched one by one, on the same device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.decoding.noise import CoupledNoise, gumbel
from paceline.engine.attention import inspect_attention
from paceline.engine.batch import SequenceInput
from paceline.engine.branches import BranchInput
from paceline.engine.cache import PagedCache
from paceline.engine.captured import PATIENCE, CudaGraphs
from paceline.engine.chains import ChainInput
from paceline.engine.device import make_current
from paceline.engine.lean import LeanForward
from paceline.engine.loading import load_model
from paceline.engine.runner import ModelRunner
from paceline.kv import Branching

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[0, 1], ids=["first device", "second device"])
def cuda(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The current device, which is not always the one that threads begin on."""
    if request.param >= torch.cuda.device_count():
        pytest.skip("no such CUDA device")
    made_current = torch.device("cuda", request.param)
    make_current(made_current)
    yield made_current
    make_current(torch.device("cuda", 0))


@pytest.fixture(params=[False, True], ids=["modules", "short"])
def runners(request: pytest.FixtureRequest, cuda: torch.device) -> tuple[ModelRunner, ModelRunner]:
    """The embedded target without and with recordings."""
    from paceline import assets

    model: Any = load_model(assets.path("target"), device=cuda, dtype="float32").model
    layers = inspect_attention(model)
    made = []
    for recorder in (None, CudaGraphs(cuda)):
        cache = PagedCache(layers, num_blocks=512, device=cuda)
        short = LeanForward(model, 2048) if request.param else None
        made.append(ModelRunner(model, cache, cuda, short=short, recorder=recorder))
    return made[0], made[1]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_batches(runners: tuple[ModelRunner, ModelRunner]) -> None:
    rng = random.Random(1)
    tables = [[runner.new_table() for _ in range(6)] for runner in runners]
    for _ in range(20):
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
        close(logits[1], logits[0])
    captured = runners[1].captured
    assert captured is not None
    assert captured.usable
    assert captured.num_recorded >= 3


def test_branches(runners: tuple[ModelRunner, ModelRunner]) -> None:
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
        close(logits[1], logits[0])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_loops(runners: tuple[ModelRunner, ModelRunner], temperature: float) -> None:
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
