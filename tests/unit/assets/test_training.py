"""Added weights change nothing at first, and training resumes from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from paceline.assets.training import deepen, record
from paceline.assets.training.deepen import DeepeningPlan, deepened, train_on
from paceline.assets.training.models import _orthogonal, build, enlarged

VOCAB = 64


def config(layers: int, intermediate: int = 48) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )


@pytest.fixture
def text() -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(1))


def test_an_added_layer_changes_nothing_at_first(text: torch.Tensor) -> None:
    wide = build(config(1), 1)
    deep = deepened(wide, config(2), text, 2)
    with torch.no_grad():
        torch.testing.assert_close(deep(text).logits, wide(text).logits)


def test_the_most_active_neurons_are_kept(text: torch.Tensor) -> None:
    wide = build(config(1), 1)
    idle = [i for i in range(48) if i % 3]
    with torch.no_grad():
        wide.model.layers[0].mlp.down_proj.weight[:, idle] = 0
    deep = deepened(wide, config(2, intermediate=16), text, 2)
    with torch.no_grad():
        torch.testing.assert_close(deep(text).logits, wide(text).logits)


@pytest.mark.parametrize(("layers", "intermediate"), [(2, 80), (4, 48), (4, 80)])
def test_added_neurons_and_layers_start_neutral_and_learn(
    text: torch.Tensor, layers: int, intermediate: int
) -> None:
    small = build(config(2), 1)
    large = enlarged(small, config(layers, intermediate), 2)
    torch.testing.assert_close(large(text).logits, small(text).logits)
    large(text).logits.square().sum().backward()
    for layer in large.model.layers:
        gradient = layer.mlp.down_proj.weight.grad
        assert gradient is not None
        assert (gradient.abs().sum(0) > 0).all()


def test_an_update_is_nearly_orthogonal() -> None:
    for shape in ((8, 8), (6, 20), (20, 6)):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 100
        stretches = torch.linalg.svdvals(_orthogonal(gradient))
        assert stretches.min() > 0.3
        assert stretches.max() < 1.3


class Told(record.BatchArchive):
    """Batches of a small vocabulary, without a target."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, index: int) -> Any:
        self.asked.append(index)
        rng = np.random.default_rng(index)
        tokens = rng.integers(0, VOCAB, (record.SEQUENCES, 4 + record.NEW_TOKENS))
        shape = (record.SEQUENCES, record.NEW_TOKENS, VOCAB)
        return tokens, (rng.standard_normal(shape) * 2).astype(np.float16)


def test_training_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    plan, told = DeepeningPlan(steps=4, passes=2, rows=1, checkpoint_every=2, warmup=1), Told()
    whole = build(config(2), 5)
    train_on(told, whole, plan, tmp_path / "whole.pt")
    resumed = build(config(2), 99)
    train_on(told, resumed, plan, _stopped_after(2, plan, tmp_path / "half.pt"))
    for name, weights in resumed.state_dict().items():
        assert torch.equal(weights, whole.state_dict()[name]), name
    assert min(told.asked) >= deepen.HELD_BACK
    assert max(told.asked) < plan.batches_at(4)


def _stopped_after(steps: int, plan: DeepeningPlan, file: Path) -> Path:
    """What is left on disk of a run that is interrupted right after a checkpoint."""

    class StoppedError(Exception):
        pass

    class Stopping(Told):
        def batch(self, index: int) -> Any:
            if len(self.asked) == steps * plan.passes:
                raise StoppedError
            return super().batch(index)

    with pytest.raises(StoppedError):
        train_on(Stopping(), build(config(2), 5), plan, file)
    assert torch.load(file, weights_only=True)["step"] == steps
    return file
