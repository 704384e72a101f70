"""Branches in one pass give what each would give alone, on every kind of model."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from harness.tiers import mostly_full

from paceline.core.errors import ResourceExhaustedError
from paceline.engine.backends.attention import inspect_attention
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import PagedCache
from paceline.engine.layout import BranchInput
from paceline.engine.loading.model import make_runner
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable, Branch, Branching
from tests.unit.engine.runners import runner_of
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


class Tree:
    """Branches over one sequence, and what each of them stands for."""

    def __init__(self, runner: ModelRunner, prefix: list[int], room: int = 40) -> None:
        self.runner, self.prefix = runner, prefix
        self.table: BlockTable = runner.new_table()
        feed(runner, self.table, prefix, want=0)
        self.region = Branching(self.table, room)
        self.branches: list[tuple[Branch, list[int]]] = []

    def open(self, kept: int, parent: int | None = None) -> None:
        above = None if parent is None else self.branches[parent][0]
        tokens = self.prefix[:kept] if parent is None else list(self.branches[parent][1])
        self.branches.append((self.region.branch(kept, above), tokens))

    def inputs(self, rng: random.Random, chosen: list[int]) -> list[BranchInput]:
        found = []
        for index in chosen:
            branch, tokens = self.branches[index]
            tokens.append(rng.randrange(97))
            found.append(BranchInput(branch, tokens[-1]))
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", mostly_full([4, 16], count=1))
@pytest.mark.parametrize("packed", [False, True], ids=["as loaded", "packed"])
def test_each_branch_sees_its_own_ancestors_only(
    models: Models, reference: Reference, kind: str, block_size: int, packed: bool
) -> None:
    # Packing takes the weights out of the model it is given.
    model = copy.deepcopy(models(kind)) if packed else models(kind)
    runner = make_runner(
        model,
        num_blocks=1024 // block_size,
        block_size=block_size,
        backends=BACKENDS if packed else ("torch",),
    )
    rng = random.Random(3)
    trees = [Tree(runner, tokens_of(n, seed=n)) for n in (23, 9)]
    for tree in trees:
        length = len(tree.prefix)
        for kept in (length, length - 1, length - 1, length - 3, 0):
            tree.open(kept)
    for step in range(5):
        if step == 1:
            for tree in trees:
                tree.open(0, parent=0)
                tree.open(0, parent=0)
        # Not all of them go on at the same time.
        chosen = [sorted(rng.sample(range(len(tree.branches)), rng.randint(1, 5))) for tree in trees]
        inputs = [i for tree, picks in zip(trees, chosen, strict=True) for i in tree.inputs(rng, picks)]
        logits = runner.forward_branches(inputs)
        rows = [
            reference(kind, tree.branches[index][1])[-1]
            for tree, picks in zip(trees, chosen, strict=True)
            for index in picks
        ]
        assert_close(logits, torch.stack(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_unwritten_slots_are_not_read(models: Models, reference: Reference, kind: str) -> None:
    """They hold NaN, and 0 times NaN is NaN."""
    cache = PagedCache(inspect_attention(models(kind)), num_blocks=64, block_size=4)
    for entries in cache.entries:
        entries.fill_(torch.nan)
    tree, rng = Tree(runner_of(models(kind), cache), tokens_of(14)), random.Random(6)
    for kept in (14, 11):
        tree.open(kept)
        tree.branches[-1][0].reserve(3)
    for chosen in ([1], [0, 1], [0]):
        logits = tree.runner.forward_branches(tree.inputs(rng, chosen))
        rows = [reference(kind, tree.branches[index][1])[-1] for index in chosen]
        assert_close(logits, torch.stack(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adopted_branch_becomes_the_sequence(models: Models, reference: Reference, kind: str) -> None:
    runner = make_runner(models(kind), num_blocks=64, block_size=4)
    tree = Tree(runner, tokens_of(14))
    rng = random.Random(5)
    tree.open(14)
    tree.open(11)
    runner.forward_branches(tree.inputs(rng, [0, 1]))
    tree.open(0, parent=0)
    for _ in range(3):
        runner.forward_branches(tree.inputs(rng, [1, 2]))
    taken, tokens = tree.branches[1]
    runner.adopt(taken)
    tree.region.free()
    assert tree.table.length == len(tokens) == 15
    more = tokens_of(5, seed=9)
    assert_close(feed(runner, tree.table, more), reference(kind, tokens + more)[len(tokens) :])
    tree.table.free()
    assert runner.cache.pool.used_blocks == 0


def test_a_full_region_or_pool_is_an_error(models: Models) -> None:
    runner = make_runner(models("llama"), num_blocks=6, block_size=4)
    tree = Tree(runner, tokens_of(12), room=8)
    with pytest.raises(ResourceExhaustedError):
        Branching(tree.table, 5)
    tree.open(12)
    rng = random.Random(1)
    for _ in range(8):
        runner.forward_branches(tree.inputs(rng, [0]))
    with pytest.raises(ResourceExhaustedError):
        runner.forward_branches([BranchInput(tree.branches[0][0], 1)])
    with pytest.raises(ResourceExhaustedError):
        runner.adopt(tree.branches[0][0])
    assert tree.table.length == 12
    tree.region.free()
    tree.table.free()
    assert runner.cache.pool.used_blocks == 0
    with pytest.raises(ValueError, match="cannot keep"):
        Branching(tree.table, 1).branch(1)
