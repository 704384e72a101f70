"""A tree in one pass, among other sequences, on every backend: rows see entries that others of it write."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.cache_attention.fixed_forks import FixedForks
from paceline.engine.backends.cache_attention.fork import Fork, forks_of
from paceline.engine.backends.cache_attention.interface import PassAttention
from paceline.engine.backends.captured import forked_inputs
from paceline.engine.backends.captured.forked_inputs import ForkedInputs
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.layout import Indices, PassLayout, SequenceInput
from paceline.engine.loading.model import make_runner
from paceline.engine.runner import ModelRunner
from paceline.engine.tree_places import TreePlaces
from paceline.kv import BlockPool, BlockTable
from tests.unit.engine.test_captured import Tracer, recording
from tests.unit.engine.test_runner import (
    VOCAB,
    Models,
    Reference,
    feed,
    models,
    reference,
    tokens_of,
)

__all__ = ["models", "reference"]

KINDS = ["llama", "qwen3", "mistral", "gemma2", "deepseek", "gpt2", "gemma4"]
SIZE = 4
PARENTS = [
    (-1, 0, 1, -1, 3),
    (-1, -1, -1),
    (-1, 0, 0, 1, 2, 4, 3, -1),
    (-1, 0, 1, 2),
    (-1, -1, 1, 2, 3, 0, 5, 2, 7),
]
"""Trees whose trunk is not their first path, is one of several longest ones, or is all of them."""


def runner_on(models: Models, kind: str, backend: str) -> ModelRunner:
    names = tuple(BACKENDS)
    usable = names[: names.index(backend) + 1]
    return make_runner(copy.deepcopy(models(kind)), num_blocks=96, block_size=SIZE, backends=usable)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def rows_of_tree(
    reference: Reference, kind: str, before: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> list[torch.Tensor]:
    """The rows after `before` and after each node, each computed from its own text."""
    texts = [[tokens[i] for i in path_to(parents, node)] for node in range(-1, len(parents))]
    return [reference(kind, [*before, *text])[-1] for text in texts]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Closer than any two rows are."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def take(
    runner: ModelRunner, table: BlockTable, base: int, parents: Sequence[int], path: Sequence[int]
) -> None:
    """Cut a table to an accepted path."""
    kept, behind = TreePlaces.of(parents).moves(path)
    slots = table.slots(table.length, table.length + table.reserved)
    runner.copy_slots([slots[place] for place in behind], table.slots(base + kept, base + len(path)))
    table.truncate_to(base + len(path))


def check_a_mixed_pass(
    runner: ModelRunner, reference: Reference, kind: str, rng: random.Random, parents: Sequence[Sequence[int]]
) -> None:
    """Trees, a chain, the chunk of a prompt and a plain row; then each tree goes on behind a path of it."""
    texts = [tokens_of(n, seed=n) for n in (13, 9, 6, *(10 + i for i in range(len(parents))))]
    tables = [runner.new_table() for _ in texts]
    for text, table in zip(texts, tables, strict=True):
        feed(runner, table, text, want=0)
    fed = [tokens_of(4, seed=1), tokens_of(5, seed=2), [3]]
    inputs = [
        SequenceInput(tables[0], fed[0], 4),
        SequenceInput(tables[1], fed[1], 0),
        SequenceInput(tables[2], fed[2], 1),
    ]
    rows = [*reference(kind, texts[0] + fed[0])[-4:], reference(kind, texts[2] + fed[2])[-1]]
    trees = []
    for text, table, tree in zip(texts[3:], tables[3:], parents, strict=True):
        # Some have tokens to catch up with, and some have known the row before the tree.
        before, known = tokens_of(rng.randint(0, 2), seed=7), rng.random() < 0.3
        fed_before = before if known or before else [5]
        tokens = [rng.randrange(VOCAB) for _ in tree]
        wanted = len(tree) + (bool(fed_before) and not known)
        trees.append((table, [*text, *fed_before], tokens, tuple(tree)))
        inputs.append(SequenceInput(table, [*fed_before, *tokens], wanted, tuple(tree)))
        rows += rows_of_tree(reference, kind, [*text, *fed_before], tokens, tree)[-wanted:]
    assert_close(runner.forward(inputs), torch.stack(rows))
    for table, text, tokens, tree in trees:
        assert table.length == len(text) + max(TreePlaces.of(tree).depths)
        path = path_to(tree, rng.randrange(-1, len(tree)))
        take(runner, table, len(text), tree, path)
        text += [tokens[node] for node in path]
        assert_close(feed(runner, table, [8, 9]), reference(kind, [*text, 8, 9])[-2:])
    for table in tables:
        table.free()
    assert runner.cache.pool.used_blocks == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_gives_what_its_paths_give_alone(
    models: Models, reference: Reference, kind: str, backend: str
) -> None:
    runner, rng = runner_on(models, kind, backend), random.Random(3)
    for trees in ([PARENTS[0]], PARENTS[1:3], PARENTS[3:]):
        check_a_mixed_pass(runner, reference, kind, rng, trees)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral", "deepseek"])
def test_a_recorded_tree_gives_the_same(models: Models, reference: Reference, kind: str) -> None:
    """Two trees among other sequences, each table gathered once, at the second use of a bucket."""
    traced = Tracer()
    runner, rng = recording(models(kind), traced), random.Random(4)
    with patch.object(FixedForks, "at", autospec=True, side_effect=FixedForks.at) as made:
        for _ in range(4):
            check_a_mixed_pass(runner, reference, kind, rng, PARENTS[:2])
    assert made.called
    assert traced.replays >= 3


@pytest.mark.planted
@pytest.mark.parametrize(
    ("kind", "bug"),
    [("llama", "sibling"), ("mistral", "window"), ("llama", "unused"), ("llama", "padding")],
)
def test_a_wrong_recorded_tree_is_seen(
    models: Models, reference: Reference, kind: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, write, bits = FixedForks.at, ForkedInputs._write, forked_inputs._bits

    def wrong_at(fixed: FixedForks, blocks: Tensor, own: Tensor, *rows: Tensor) -> PassAttention:
        positions, slots, shared, seen = rows
        if bug == "window":
            own = torch.stack([own[0], torch.zeros_like(own[1])])
        if bug == "unused":
            slots = torch.full_like(slots, 1023)
        return at(fixed, blocks, own, positions, slots, shared, seen)

    def wrong_write(inputs: ForkedInputs, number: int, fork: Fork, fed: Indices) -> None:
        write(inputs, number, fork, fed)
        if bug == "padding":
            inputs._rows[0, number, len(fork.rows) :] = 0

    def wrong_bits(seen: Sequence[Sequence[int]]) -> Indices:
        """All nodes beside the trunk see the first of them."""
        return bits([{0, *places} if places and bug == "sibling" else places for places in seen])

    monkeypatch.setattr(FixedForks, "at", wrong_at)
    monkeypatch.setattr(ForkedInputs, "_write", wrong_write)
    monkeypatch.setattr(forked_inputs, "_bits", wrong_bits)
    runner, rng = recording(models(kind), Tracer()), random.Random(4)
    check_a_mixed_pass(runner, reference, kind, rng, PARENTS[:2])
    with pytest.raises(AssertionError, match="not close"):
        check_a_mixed_pass(runner, reference, kind, rng, PARENTS[:2])


def test_positions_and_not_rows_are_bounded_by_the_models_length(models: Models) -> None:
    runner = runner_on(models, "llama", "torch")
    table, most = runner.new_table(), runner.max_model_len
    feed(runner, table, tokens_of(most - 2), want=0)
    wide, deep = (-1,) * 8, (-1, 0)
    with pytest.raises(InvalidArgumentError, match="entries are more"):
        runner.forward([SequenceInput(table, [1, 2, 3], 3, deep)])
    assert runner.forward([SequenceInput(table, [1, *range(8)], 9, wide)]).shape[0] == 9
    assert table.length == most


@pytest.mark.parametrize(
    ("tokens", "parents", "before"),
    [([1, 2], (-1, 0), 0), ([1], (-1, 0), 3), ([1, 2, 3], (-1, 1), 3), ([1, 2, 3], (-1, -2), 3)],
    ids=["no token before it", "a node without a token", "a later parent", "no such parent"],
)
def test_malformed_trees_are_refused(
    models: Models, tokens: list[int], parents: tuple[int, ...], before: int
) -> None:
    runner: Any = runner_on(models, "llama", "torch")
    table = runner.new_table()
    if before:
        feed(runner, table, tokens_of(before), want=0)
    with pytest.raises(InvalidArgumentError) as caught:
        runner.forward([SequenceInput(table, tokens, 1, parents)])
    assert caught.value.field == "parents"
    assert table.length == before


def test_the_layout_of_a_tree() -> None:
    """The trunk in the table, the other nodes behind it; logits in the order of the tokens."""
    table = BlockTable(BlockPool(8, SIZE))
    table.reserve(2)
    table.commit(2)
    item = SequenceInput(table, [50, 10, 11, 12, 13, 14], 6, (-1, -1, 1, 2, 0))
    table.reserve(len(item.token_ids))
    layout = PassLayout.of_sequences([item])
    assert layout.rows.tolist() == [
        [50, 11, 12, 13, 10, 14],
        [2, 3, 4, 5, 3, 4],
        [2, 3, 4, 5, 6, 7],
    ]
    assert layout.wanted.tolist() == [0, 4, 1, 2, 3, 5]
    assert [(s.first, s.count, s.start, s.length, list(s.own)) for s in layout.sequences] == [
        (0, 4, 2, 6, []),
        (4, 1, 3, 4, [6]),
        (5, 1, 4, 5, [6, 7]),
    ]
    assert list(item.entries) == [50, 11, 12, 13]
    (fork,) = forks_of(layout.sequences)
    assert fork.rows == [0, 1, 2, 3, 4, 5]
    assert fork.positions == [2, 3, 4, 5, 3, 4]
    assert fork.shared == [3, 4, 5, 6, 3, 3]
    assert fork.seen == [[], [], [], [], [0], [0, 1]]
    assert fork.own == {6: 3, 7: 4}
