"""A tree in one pass: rows see entries that other rows of the pass write, on every backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import PassLayout, SequenceInput, SequenceRows
from paceline.engine.loading.model import make_runner
from paceline.kv import BlockTable, Branching
from tests.unit.engine.test_runner import (
    Models,
    Reference,
    assert_close,
    feed,
    models,
    reference,
    tokens_of,
)

__all__ = ["models", "reference"]

KINDS = ["llama", "qwen3", "mistral", "gemma2", "deepseek", "gpt2"]
SIZE = 4
NEWEST, CHAIN = 5, [6, 8, 10]
BESIDE = [7, 9]
"""A second child of the newest token, and a child of that."""


def beside(table: BlockTable, first: int, own: Sequence[int]) -> SequenceRows:
    """One row after the newest token and after own entries, the last of which is its own."""
    shared = table.length + 1
    base = table.contiguous_start(shared)
    blocks = () if base is not None else table.blocks[: -(-shared // SIZE)]
    place = shared + len(own)
    return SequenceRows(first, 1, place - 1, place, id(table), SIZE, base, blocks, own)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_gives_what_its_paths_give_alone(
    models: Models, reference: Reference, kind: str, backend: str
) -> None:
    names = tuple(BACKENDS)
    usable = names[: names.index(backend) + 1]
    runner = make_runner(copy.deepcopy(models(kind)), num_blocks=64, block_size=SIZE, backends=usable)
    prefix, table = tokens_of(13), runner.new_table()
    feed(runner, table, prefix, want=0)
    slots = Branching(table, 8).slots[: len(BESIDE)]
    runner.cache.apply(table.reserve(1 + len(CHAIN)))
    chain = PassLayout.of_sequences([SequenceInput(table, [NEWEST, *CHAIN], 1 + len(CHAIN))])
    first = len(CHAIN) + 1
    groups = [*chain.sequences, beside(table, first, slots[:1]), beside(table, first + 1, slots)]
    others = np.array([BESIDE, [table.length + 1, table.length + 2], slots])
    layout = PassLayout(np.concatenate([chain.rows, others], axis=1), groups, np.arange(first + 2))
    logits = runner.backend.forward(layout, runner.cache, CancelToken())
    assert logits is not None
    paths = [CHAIN[:i] for i in range(len(CHAIN) + 1)] + [BESIDE[:1], BESIDE]
    expected = [reference(kind, [*prefix, NEWEST, *path])[-1] for path in paths]
    assert_close(logits[:, : runner.vocab_size], torch.stack(expected))
