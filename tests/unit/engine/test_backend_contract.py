"""The contract of backends, and wrong ones that break it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from paceline.decoding.noise import CoupledNoise, gumbel
from paceline.engine.backends.attention import inspect_attention
from paceline.engine.backends.cache_attention.varlen import VarlenAttention
from paceline.engine.backends.captured import PATIENCE
from paceline.engine.backends.interface import Backend, Skills
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import BranchInput, PassLayout, SequenceInput
from paceline.engine.loading.model import random_model
from paceline.engine.multi_step import Chain, ChainInput
from paceline.engine.runner import ModelRunner
from paceline.engine.tree_places import TreePlaces
from paceline.kv import BlockTable, Branching
from tests.unit.engine.runners import backend_of, captured_of, recording_runner, runner_of
from tests.unit.engine.varlen_kernel import kernel_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 97
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.2,
)
RECORDED = ["torch", "fused_eager"]
REPEATS = 1 + PATIENCE
"""What is recorded is recorded when its shape comes again."""


class Subject:
    """A runner on the backend in question, and transformers' logits of the same model."""

    def __init__(self, make: Callable[[Any, PagedCache], ModelRunner]) -> None:
        model = random_model(CONFIG, seed=1)
        self.twin = copy.deepcopy(model)
        self.twin.set_attn_implementation("eager")
        cache = PagedCache(inspect_attention(model), num_blocks=128, block_size=4)
        # Entries that no pass wrote must not be read.
        for entries in cache.entries:
            entries.fill_(torch.nan)
        self.runner = make(model, cache)
        self.skills = self.runner.backend.skills

    def expect(self, logits: Tensor, *rows: tuple[Sequence[int], int]) -> None:
        """`logits` are those after the last rows of each of some texts: (text, how many rows)."""
        with torch.inference_mode():
            found = [
                self.twin(torch.tensor([list(t)]), use_cache=False).logits[0, len(t) - n :] for t, n in rows
            ]
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, torch.cat(found), atol=5e-5, rtol=5e-5)

    def feed(self, table: BlockTable, tokens: Sequence[int], wanted: int = 0) -> Tensor:
        return self.runner.forward([SequenceInput(table, tokens, wanted)])

    def interleaved(self, texts: Sequence[Sequence[int]]) -> list[BlockTable]:
        """Tables that hold the texts, their blocks in turn."""
        tables = [self.runner.new_table() for _ in texts]
        for start in range(0, max(map(len, texts)), 4):
            for table, text in zip(tables, texts, strict=True):
                if start < len(text):
                    self.feed(table, text[start : start + 4])
        return tables


def text_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def check_prompts_chunks_and_decoding(s: Subject) -> None:
    text = text_of(50, 1)
    for _ in range(REPEATS):
        with s.runner.new_table() as table:
            s.expect(s.feed(table, text[:40], 40), (text[:40], 40))
        with s.runner.new_table() as table:
            assert s.feed(table, text[:21]).shape == (0, VOCAB)
            s.expect(s.feed(table, text[21:40], 2), (text[:40], 2))
            s.expect(s.feed(table, text[40:41], 1), (text[:41], 1))
            s.expect(s.feed(table, text[41:46], 5), (text[:46], 5))


def check_rollback(s: Subject) -> None:
    prefix, wrong, right = text_of(18, 2), text_of(5, 3), text_of(5, 4)
    for _ in range(REPEATS):
        with s.runner.new_table() as table:
            s.feed(table, [*prefix, *wrong])
            table.truncate_to(len(prefix) + 2)
            s.expect(s.feed(table, right, 5), ([*prefix, *wrong[:2], *right], 5))


def check_mixed_batches(s: Subject) -> None:
    """A prompt's chunk, decoding, verification and rows that nobody wants, of tables that lie in pieces."""
    texts = [text_of(length, 10 + length) for length in (3, 30, 9, 17)]
    fed, wanted = [text_of(n, 20 + n) for n in (7, 1, 5, 4)], (1, 1, 5, 0)
    tables = s.interleaved(texts)
    for _ in range(REPEATS):
        inputs = [SequenceInput(*item) for item in zip(tables, fed, wanted, strict=True)]
        logits = s.runner.forward(inputs)
        s.expect(logits, *(([*t, *f], n) for t, f, n in zip(texts, fed, wanted, strict=True)))
        for table, text in zip(tables, texts, strict=True):
            table.truncate_to(len(text))
        if s.skills.row_invariant:
            alone = [s.feed(*item) for item in zip(tables, fed, wanted, strict=True)]
            assert torch.equal(torch.cat(alone), logits)
            for table, text in zip(tables, texts, strict=True):
                table.truncate_to(len(text))
    for table in tables:
        table.free()


def check_branches(s: Subject) -> None:
    """Over two sequences, of several lengths, one of them from a branch that has entries of its own."""
    texts = [text_of(14, 5), text_of(9, 6)]
    tables = s.interleaved(texts)
    for _ in range(REPEATS):
        regions = [Branching(table, 20) for table in tables]
        grown = regions[0].branch(14)
        s.expect(s.runner.forward_branches([BranchInput(grown, 3)]), ([*texts[0], 3], 1))
        branches = [regions[0].branch(14), regions[0].branch(0, grown), regions[0].branch(11)]
        seen = [texts[0], [*texts[0], 3], texts[0][:11]]
        branches += [regions[1].branch(9), regions[1].branch(0)]
        seen += [texts[1], []]
        for step in (7, 8):
            seen = [[*tokens, step + i] for i, tokens in enumerate(seen)]
            inputs = [BranchInput(branch, tokens[-1]) for branch, tokens in zip(branches, seen, strict=True)]
            s.expect(s.runner.forward_branches(inputs), *((tokens, 1) for tokens in seen))
        for region in regions:
            region.free()
    for table, text in zip(tables, texts, strict=True):
        s.expect(s.feed(table, [1], 1), ([*text, 1], 1))
        table.free()


TREES = {"deep": (-1, 0, -1, 2, 3, 1), "wide": (-1, -1, -1, 0), "a chain": (-1, 0, 1)}
"""The parents of nodes. Paths are as long as they may be on several branches, or the tree is one path."""


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def check_trees(s: Subject) -> None:
    """Beside a chain, a prompt's chunk and a plain row; then each sequence goes on behind one path."""
    texts = [text_of(length, 30 + length) for length in (13, 6, 10, 9, 21, 5)]
    tables, tokens = s.interleaved(texts), text_of(6, 3)
    for turn in range(REPEATS):
        inputs = [SequenceInput(tables[i], text_of(n, i), w) for i, n, w in ((0, 4, 4), (1, 5, 0), (2, 1, 1))]
        seen = [([*texts[i], *inputs[i].token_ids], inputs[i].num_logits) for i in range(3)]
        for i, parents in enumerate(TREES.values(), 3):
            # The last has no token to catch up with, and its row before the tree is not wanted.
            before, fed = ([], []) if i == 5 else ([4, 6], [4, 6])
            nodes = tokens[: len(parents)]
            inputs.append(SequenceInput(tables[i], [*fed, *nodes], len(nodes) + (i < 5), parents))
            paths = [path_to(parents, node) for node in range(-(i < 5), len(parents))]
            seen += [([*texts[i], *before, *(nodes[n] for n in path)], 1) for path in paths]
        s.expect(s.runner.forward(inputs), *seen)
        for i, parents in enumerate(TREES.values(), 3):
            table, base = tables[i], len(texts[i]) + (2 if i < 5 else 0)
            assert table.length == base + max(TreePlaces.of(parents).depths)
            path = path_to(parents, (turn + 5) % len(parents))
            kept, behind = TreePlaces.of(parents).moves(path)
            slots = table.slots(table.length, table.length + table.reserved)
            sources, wanted = [slots[place] for place in behind], table.slots(base + kept, base + len(path))
            s.runner.copy_slots(sources, wanted)
            table.truncate_to(base + len(path))
            text = [*texts[i], *([4, 6] if i < 5 else []), *(tokens[node] for node in path)]
            s.expect(s.feed(table, [8, 9], 2), ([*text, 8, 9], 2))
        for table, text in zip(tables, texts, strict=True):
            table.truncate_to(len(text))
        if s.skills.row_invariant:
            check_bits_of_a_tree(s, tables[3], TREES["deep"], tokens)
            tables[3].truncate_to(len(texts[3]))
    for table in tables:
        table.free()


def check_bits_of_a_tree(
    s: Subject, table: BlockTable, parents: tuple[int, ...], tokens: Sequence[int]
) -> None:
    """Each row is that of its path, fed as a chain."""
    length = table.length
    together = s.runner.forward([SequenceInput(table, [4, *tokens], len(tokens) + 1, parents)])
    for node in range(-1, len(parents)):
        table.truncate_to(length)
        alone = s.feed(table, [4, *(tokens[n] for n in path_to(parents, node))], 1)
        assert torch.equal(alone[0], together[node + 1])


def check_chains(s: Subject) -> None:
    """Greedy and with noise, on tables and on a branch: what single passes choose."""
    texts = [text_of(12, 7), text_of(6, 8)]
    tables, drawn = s.interleaved(texts), 0
    for _ in range(REPEATS):
        region = Branching(tables[0], 8)
        inputs = [
            ChainInput(tables[0], [4], 4),
            ChainInput(tables[1], [5], 2, 0.8, CoupledNoise(9, 7)),
            ChainInput(region.branch(10), [6], 3),
        ]
        chains = s.runner.forward_chains(inputs)
        for item, chain, text in zip(inputs, chains, [*texts, texts[0][:10]], strict=True):
            drawn += len(chain.token_ids)
            assert item.end.length == len(text) + item.entries(chain)
            assert chain.token_ids in ([], ()) or list(chain.token_ids) == chosen(s, text, item)
        region.free()
        for table, text in zip(tables, texts, strict=True):
            table.truncate_to(len(text))
    assert (drawn > 0) == (s.skills.chains is not None)
    for table in tables:
        table.free()


def chosen(s: Subject, text: Sequence[int], item: ChainInput) -> list[int]:
    """What the single passes of a chain choose."""
    tokens = list(item.token_ids)
    with s.runner.new_table() as table:
        s.feed(table, text)
        for step in range(item.steps):
            row = s.feed(table, tokens[-1:], 1)[0].double()
            if item.noise is not None:
                row = row / item.temperature + gumbel([item.noise.seed], [item.noise.first + step], VOCAB)[0]
            tokens.append(int(row.argmax()))
    return tokens[1:]


def check_cancelled_passes(s: Subject) -> None:
    """They leave the table as it was; a backend that cannot cancel computes them."""
    text, cancel = text_of(15, 9), CancelToken()
    with s.runner.new_table() as table:
        s.feed(table, text)
        blocks = table.blocks
        cancel.cancel()
        logits = s.runner.forward_cancellable([SequenceInput(table, [1] * 9, 9)], cancel)
        assert (logits is None) == s.skills.cancellable
        if logits is None:
            assert (table.length, table.blocks) == (len(text), blocks)
        table.truncate_to(len(text))
        cancel.reset()
        s.expect(s.feed(table, [2, 3], 2), ([*text, 2, 3], 2))


CHECKS = [
    check_prompts_chunks_and_decoding,
    check_rollback,
    check_mixed_batches,
    check_branches,
    check_trees,
    check_chains,
    check_cancelled_passes,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_keeps_the_contract(name: str, check: Callable[[Subject], None]) -> None:
    subject = Subject(lambda model, cache: runner_of(model, cache, name))
    assert subject.runner.backend.weight_bytes > 0
    check(subject)
    assert subject.runner.cache.pool.used_blocks == 0


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", RECORDED)
def test_a_captured_backend_keeps_the_contract(name: str, check: Callable[[Subject], None]) -> None:
    subject = Subject(lambda model, cache: recording_runner(model, cache, lambda step: step, name))
    check(subject)
    assert captured_of(subject.runner).usable
    assert captured_of(subject.runner).num_recorded > 0 or check is check_cancelled_passes


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_attention_in_place_keeps_the_contract(
    name: str, recorded: bool, check: Callable[[Subject], None]
) -> None:
    def make(model: Any, cache: PagedCache) -> ModelRunner:
        attention = VarlenAttention(cache.block_size)
        if recorded:
            return recording_runner(model, cache, lambda step: step, name, attention=attention)
        return runner_of(model, cache, name, attention)

    with kernel_on_cpu(page=4) as calls:
        check(Subject(make))
    assert calls


class Wrong:
    """Another backend with one fault."""

    def __init__(self, backend: Backend, fault: str) -> None:
        self._backend, self._fault = backend, fault
        self.weight_bytes, self.recordable = backend.weight_bytes, backend.recordable

    @property
    def skills(self) -> Skills:
        return replace(
            self._backend.skills, cancellable=self._backend.skills.cancellable or self._fault == "cancel"
        )

    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        rows = layout.rows.copy()
        if self._fault == "positions":
            rows[1] += rows[1] > 9
        elif self._fault == "slots" and rows.shape[1] > 1:
            rows[2] = rows[2, ::-1]
        elif self._fault == "branches":
            layout = replace(
                layout, sequences=[replace(s, own=s.own[-1:] * len(s.own)) for s in layout.sequences]
            )
        elif self._fault == "ancestors":
            # A node beside the trunk sees an entry beside it in the place of its last one on the trunk.
            seen = [s if not s.own else replace(s, own=[s.own[0], *s.own]) for s in layout.sequences]
            layout = replace(layout, sequences=seen)
        elif self._fault == "order":
            layout = replace(layout, wanted=np.sort(layout.wanted))
        elif self._fault == "wanted" and len(layout.wanted) > 1:
            layout = replace(layout, wanted=layout.wanted - (layout.wanted[0] > 0))
        return self._backend.forward(replace(layout, rows=rows), cache, cancel)

    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        chains = self._backend.draw_chains(layout, inputs, cache, cancel)
        if self._fault != "chains":
            return chains
        return [replace(chain, token_ids=[*chain.token_ids[:-1], 0]) for chain in chains]

    def pack(self) -> bool:
        return self._backend.pack()


@pytest.mark.planted
@pytest.mark.parametrize(
    ("fault", "name", "seen_by"),
    [
        ("positions", "torch", check_prompts_chunks_and_decoding),
        ("slots", "compiled", check_rollback),
        ("branches", "torch", check_branches),
        ("branches", "compiled", check_branches),
        ("ancestors", "torch", check_trees),
        ("ancestors", "compiled", check_trees),
        ("order", "torch", check_trees),
        ("order", "compiled", check_trees),
        ("wanted", "torch", check_mixed_batches),
        ("cancel", "torch", check_cancelled_passes),
        ("chains", "compiled", check_chains),
    ],
)
def test_a_wrong_backend_breaks_the_contract(
    fault: str, name: str, seen_by: Callable[[Subject], None]
) -> None:
    def make(model: Any, cache: PagedCache) -> ModelRunner:
        return ModelRunner(model, cache, Wrong(backend_of(model, cache, name), fault))

    with pytest.raises(AssertionError):
        seen_by(Subject(make))
