"""Recorded passes give what passes that are laid out anew give, and leave the same in the cache.

A CUDA graph replays what the device was told while the step was recorded and nothing of what Python decided
meanwhile. `traced` does that on a CPU: it keeps the tensor operations of one run, with the tensors they had
then, and repeats those. What a recorded step may not do at all, look at a number or mix devices, fails on
the `meta` device, whose tensors have none.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness.tiers import mostly_full
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.core.errors import ResourceExhaustedError
from paceline.core.limits import MAX_TREE_NODES
from paceline.core.types import SparseDistribution
from paceline.decoding.noise import CoupledNoise, gumbel
from paceline.decoding.sampling import to_sparse
from paceline.decoding.support import draw_in_tensors
from paceline.engine.backends.attention import inspect_attention
from paceline.engine.backends.cache_attention.fixed_forks import MAX_OWN, FixedForks
from paceline.engine.backends.cache_attention.gathered import GatheredPass
from paceline.engine.backends.cache_attention.group import AttentionGroup
from paceline.engine.backends.captured import choosing
from paceline.engine.backends.captured.backend import PATIENCE, PATIENCE_FULL
from paceline.engine.backends.captured.buckets import (
    FORKED_ROWS,
    MAX_BATCH_ROWS,
    MAX_KEYS,
    MAX_ROWS,
    MAX_SEQUENCES,
    bucket_of,
    forked_bucket_of,
)
from paceline.engine.backends.captured.forked_inputs import _bits
from paceline.engine.backends.captured.recording import Step
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.cache import PagedCache
from paceline.engine.layout import BranchInput, Indices, SequenceInput
from paceline.engine.loading import model as loading
from paceline.engine.loading.model import make_runner
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills, SparseDraws
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable, Branching
from tests.unit.engine.runners import captured_of, recording_runner
from tests.unit.engine.test_branches import Tree
from tests.unit.engine.test_runner import (
    VOCAB,
    Models,
    Reference,
    assert_close,
    feed,
    models,
    reference,
    tokens_of,
)

__all__ = ["models", "reference"]

KINDS = ["gemma2", "gpt2", "mistral", "stablelm", "deepseek"]


class Tracer:
    """Records as a CUDA graph does: runs the step once, then keeps its tensor operations."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, step: Step) -> Step:
        self.recordings += 1
        step()
        recorded = make_fx(step)()

        def replay() -> Tensor:
            self.replays += 1
            result: Tensor = recorded()
            return result

        return replay


@pytest.fixture
def traced() -> Tracer:
    return Tracer()


def recording(model: Any, recorder: Any, *, block_size: int = 4, name: str = "torch") -> ModelRunner:
    """A runner that is not compiled, whichever pass it takes."""
    layers = inspect_attention(model)
    cache = PagedCache(layers, num_blocks=1024 // block_size, block_size=block_size)
    # What is not written must not be read, and 0 times it must not be taken for 0.
    for entries in cache.entries:
        entries.fill_(torch.nan)
    return recording_runner(model, cache, recorder, name)


@pytest.mark.parametrize(
    ("kind", "block_size"), mostly_full([("llama", 16), *((kind, 4) for kind in KINDS)], count=3)
)
def test_a_replayed_batch_has_transformers_logits(
    models: Models, reference: Reference, kind: str, block_size: int, traced: Tracer
) -> None:
    """Decoding, verification and rollback of sequences that come, go and grow past a block."""
    runner, rng = recording(models(kind), traced, block_size=block_size), random.Random(2)
    texts = [tokens_of(n, seed=n) for n in (1, 9, 33, 70)]
    tables = [runner.new_table() for _ in texts]
    for text, table in zip(texts, tables, strict=True):
        feed(runner, table, text, want=0)
    for turn in range(10):
        chosen = sorted(rng.sample(range(len(texts)), rng.choice([2, 3, 3, 4])))
        widths = [rng.choice([1, 4, 5]) if turn % 2 else 1 for _ in chosen]
        fed = [[rng.randrange(VOCAB) for _ in range(n)] for n in widths]
        wanted = [rng.randint(1, n) for n in widths]
        inputs = [SequenceInput(tables[i], f, w) for i, f, w in zip(chosen, fed, wanted, strict=True)]
        logits = runner.forward(inputs)
        rows = [reference(kind, texts[i] + f)[-w:] for i, f, w in zip(chosen, fed, wanted, strict=True)]
        assert_close(logits, torch.cat(rows))
        for i, f in zip(chosen, fed, strict=True):
            kept = rng.randint(0, len(f))
            texts[i] += f[:kept]
            tables[i].truncate_to(len(texts[i]))
    assert traced.replays >= 4
    for text, table in zip(texts, tables, strict=True):
        assert_close(feed(runner, table, [5]), reference(kind, [*text, 5])[-1:])


def test_a_shared_prefix_is_read_and_not_written(
    models: Models, reference: Reference, traced: Tracer
) -> None:
    runner, prefix = recording(models("llama"), traced), tokens_of(16)
    first = runner.new_table()
    feed(runner, first, prefix, want=0)
    tables = [first]
    for _ in range(2):
        table = runner.new_table()
        table.share(first.blocks)
        tables.append(table)
    for turn in range(4):
        logits = runner.forward([SequenceInput(t, [turn, i], 1) for i, t in enumerate(tables)])
        for table in tables:
            table.truncate_to(len(prefix))
        assert_close(
            logits, torch.stack([reference("llama", [*prefix, turn, i])[-1] for i in range(len(tables))])
        )
    assert traced.replays == 4 - PATIENCE


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_branches_see_only_their_own_ancestors(
    models: Models, reference: Reference, kind: str, traced: Tracer
) -> None:
    runner, rng = recording(models(kind), traced), random.Random(3)
    trees = [Tree(runner, tokens_of(n, seed=n)) for n in (23, 9)]
    for tree in trees:
        length = len(tree.prefix)
        for kept in (length, length - 1, length - 3, 0):
            tree.open(kept)
    for step in range(6):
        if step == 2:
            for tree in trees:
                tree.open(0, parent=0)
        chosen = [sorted(rng.sample(range(len(tree.branches)), rng.randint(1, 4))) for tree in trees]
        inputs = [i for tree, picks in zip(trees, chosen, strict=True) for i in tree.inputs(rng, picks)]
        logits = runner.forward_branches(inputs)
        rows = [
            reference(kind, tree.branches[index][1])[-1]
            for tree, picks in zip(trees, chosen, strict=True)
            for index in picks
        ]
        assert_close(logits, torch.stack(rows))
    assert traced.replays >= 3


def one_by_one(runner: ModelRunner, item: ChainInput) -> Chain:
    """The same chain from single passes."""
    assert isinstance(item.end, BlockTable)
    length, tokens, others, margins, distributions = item.end.length, list(item.token_ids), [], [], []
    if tokens[:-1]:
        feed(runner, item.end, tokens[:-1], want=0)
    for step in range(item.steps):
        scores = feed(runner, item.end, tokens[-1:])[0] / (item.temperature or 1.0)
        row = scores.double()
        if item.noise is not None:
            row = row + gumbel([item.noise.seed], [item.noise.first + step], VOCAB)[0]
        token = int(row.argmax())
        if item.draws is not None:
            u = torch.from_numpy(item.draws.uniforms[step : step + 1])
            drawn, *support = draw_in_tensors(scores[None], u, item.draws.mass, item.draws.bound)
            token = int(drawn)
            distributions += to_sparse(*support)
        best = [other for other in row.topk(item.num_others + 1).indices.tolist() if other != token]
        margins.append(float(row[token] - row[best[0]]) if item.num_others else 0.0)
        tokens.append(token)
        others.append(tuple(best[: item.num_others]))
    item.end.truncate_to(length)
    return Chain(tokens[len(item.token_ids) :], distributions, others, margins)


def test_a_recorded_chain_equals_single_passes(models: Models, traced: Tracer) -> None:
    """Greedy and with noise in one loop, of several lengths; the cache has the same entries afterwards."""
    runner, rng = recording(models("llama"), traced, name="fused_eager"), random.Random(7)
    assert runner.chain_skills == ChainSkills(max_feed=2)
    tables = [runner.new_table() for _ in range(5)]
    for i, table in enumerate(tables):
        feed(runner, table, tokens_of(3 + 7 * i, seed=i), want=0)
    made = 0
    for _ in range(3):
        items = []
        for table, steps, temperature in zip(tables, (3, 2, 3, 3, 2), (0.0, 0.7, 1.3, 0.0, 0.9), strict=True):
            noise = CoupledNoise(rng.randrange(2**64), table.length + 1) if temperature else None
            items.append(ChainInput(table, [rng.randrange(VOCAB)], steps, temperature, noise, num_others=3))
        lengths = [table.length for table in tables]
        expected = [one_by_one(runner, item) for item in items]
        chains = runner.forward_chains(items)
        if chains[0].token_ids:
            made += 1
            for chain, wanted in zip(chains, expected, strict=True):
                assert chain.token_ids == wanted.token_ids
                assert chain.others == wanted.others
                assert chain.margins == pytest.approx(wanted.margins, abs=1e-4)
            assert [t.length - n for t, n in zip(tables, lengths, strict=True)] == [3, 2, 3, 3, 2]
            after = [feed(runner, table, [1]) for table in tables]
            for table, n, item, chain, logits in zip(tables, lengths, items, chains, after, strict=True):
                table.truncate_to(n)
                fed = [*item.token_ids, *chain.token_ids][:-1]
                assert_close(feed(runner, table, [*fed, 1], want=1), logits)
        for table, n in zip(tables, lengths, strict=True):
            table.truncate_to(n)
    assert made == 3 - PATIENCE


@pytest.mark.parametrize("num_others", [0, 3])
def test_a_recorded_chain_draws_what_single_steps_draw(
    models: Models, traced: Tracer, num_others: int
) -> None:
    """With their distributions, beside a chain that chooses; some begin with two tokens."""
    runner, rng = recording(models("llama"), traced, name="fused_eager"), np.random.default_rng(8)
    tables = [runner.new_table() for _ in range(4)]
    for i, table in enumerate(tables):
        feed(runner, table, tokens_of(3 + 7 * i, seed=i), want=0)
    made = 0
    for turn in range(3):
        items = [
            ChainInput(
                table,
                rng.integers(0, VOCAB, count).tolist(),
                3,
                0.7 + i / 3,
                draws=SparseDraws(rng.random(3), 0.9, 12) if i else None,
                num_others=num_others,
            )
            for i, (table, count) in enumerate(zip(tables, (2, 1, 2, 1), strict=True))
        ]
        items[0] = replace(items[0], temperature=0.0)
        lengths = [table.length for table in tables]
        expected = [one_by_one(runner, item) for item in items]
        chains = runner.forward_chains(items)
        if chains[0].token_ids:
            made += 1
            for item, chain, wanted in zip(items, chains, expected, strict=True):
                assert chain.token_ids == wanted.token_ids, turn
                check_alike(chain.distributions, wanted.distributions)
                if num_others:
                    assert chain.others == wanted.others
                    assert chain.margins == pytest.approx(wanted.margins, abs=1e-4)
                assert item.end.length == lengths[tables.index(item.end)] + len(item.token_ids) + 2
        for table, n in zip(tables, lengths, strict=True):
            table.truncate_to(n)
    assert made == 3 - PATIENCE


def check_alike(found: Sequence[SparseDistribution], wanted: Sequence[SparseDistribution]) -> None:
    """Logits of recorded and of single passes differ in their last bits."""
    for mine, right in zip(found, wanted, strict=True):
        assert mine.token_ids == right.token_ids
        own, other = (np.frombuffer(d.probabilities, dtype="<f4") for d in (mine, right))
        np.testing.assert_allclose(own, other, rtol=1e-3)
        assert 0 < len(own) <= 12


@pytest.mark.parametrize("num_others", [0, 3])
def test_kernels_choose_what_tensors_choose(
    models: Models, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loop, which is not recorded here. A row without a number ends its chain alone."""
    triton = pytest.importorskip("triton", reason="no Triton: pip install '.[cuda-test]'")
    if not triton.knobs.runtime.interpret:
        pytest.skip("the kernels are compiled here, and this model is on a CPU")
    from paceline.decoding.cuda import gumbel_kernels

    model = loading.random_model(models("llama").config, seed=1)
    model.model.embed_tokens.weight.data[50] = torch.nan
    made = []
    for kernels in (None, gumbel_kernels):
        monkeypatch.setattr(choosing, "gumbel_kernels", lambda device, found=kernels: found)
        runner = recording(model, lambda step: step, name="fused_eager")
        for _ in range(1 + PATIENCE):
            tables = [runner.new_table() for _ in range(3)]
            for i, table in enumerate(tables):
                feed(runner, table, tokens_of(3 + 7 * i, seed=i), want=0)
            items = [
                ChainInput(table, [token], 3, temperature, noise, num_others=num_others)
                for table, token, temperature, noise in zip(
                    tables,
                    (3, 4, 50),
                    (0.0, 0.7, 1.3),
                    (None, CoupledNoise(2**64 - 1, 11), CoupledNoise(5, 18)),
                    strict=True,
                )
            ]
            chains = runner.forward_chains(items)
            for table in tables:
                table.free()
        made.append(chains)
    assert [len(chain.token_ids) for chain in made[0]] == [3, 3, 0]
    assert made[0] == made[1]


def test_a_recorded_chain_continues_from_branches(models: Models, traced: Tracer) -> None:
    """Beside one on a table, and after entries that a branch has already."""
    runner = recording(models("llama"), traced, name="fused_eager")
    text = tokens_of(21)
    made: list[list[Chain]] = []
    for _ in range(1 + PATIENCE):
        table, alone = runner.new_table(), runner.new_table()
        for end in (table, alone):
            feed(runner, end, text, want=0)
        region = Branching(table, 20)
        kept, grown = region.branch(14), region.branch(21)
        runner.forward_branches([BranchInput(grown, 6)])
        noise = CoupledNoise(2**64 - 1, 15)
        items = [
            ChainInput(kept, [8], 3, 0.8, noise, num_others=2),
            ChainInput(grown, [9], 3, num_others=2),
            ChainInput(alone, [8], 3, num_others=2),
        ]
        expected = []
        for item, prefix in zip(items, (text[:14], [*text, 6], text), strict=True):
            own = runner.new_table()
            feed(runner, own, prefix, want=0)
            expected.append(one_by_one(runner, replace(item, end=own)))
            own.free()
        made.append(runner.forward_chains(items))
        grown_by = [3 if chain.token_ids else 0 for chain in made[-1]]
        assert [kept.length - 14, grown.length - 22, alone.length - 21] == grown_by
        if made[-1][0].token_ids:
            for chain, wanted in zip(made[-1], expected, strict=True):
                assert (chain.token_ids, chain.others) == (wanted.token_ids, wanted.others)
            runner.adopt(grown)
            tokens = [*text, 6, 9, *made[-1][1].token_ids[:2]]
            other = runner.new_table()
            feed(runner, other, tokens, want=0)
            assert_close(feed(runner, table, [4]), feed(runner, other, [4]))
            other.free()
        region.free()
        table.free()
        alone.free()
    assert made[-1][0].token_ids
    assert runner.cache.pool.used_blocks == 0


def test_a_recorded_chain_ends_at_broken_logits(models: Models, traced: Tracer) -> None:
    """A token whose embedding is no number has no successor; other sequences go on."""
    model = loading.random_model(models("llama").config, seed=1)
    model.lm_head.weight.data[50] = 100 * model.lm_head.weight.data[50]
    model.model.embed_tokens.weight.data[50] = torch.nan
    runner = recording(model, traced)
    tables = [runner.new_table() for _ in range(16)]
    chains: list[Chain] = []
    for _ in range(1 + PATIENCE):
        for table in tables:
            table.truncate_to(0)
        chains = runner.forward_chains([ChainInput(table, [t], 6) for t, table in enumerate(tables)])
    assert any(50 in chain.token_ids for chain in chains)
    assert any(len(chain.token_ids) == 6 for chain in chains)
    for table, chain in zip(tables, chains, strict=True):
        assert 50 not in chain.token_ids[:-1]
        assert len(chain.token_ids) == 6 or chain.token_ids[-1] == 50
        assert table.length == len(chain.token_ids)


def test_recorded_passes_without_blocks_change_nothing(models: Models, traced: Tracer) -> None:
    layers = inspect_attention(models("llama"))
    runner = recording_runner(models("llama"), PagedCache(layers, num_blocks=2, block_size=4), traced)
    tables = [runner.new_table(), runner.new_table()]
    with pytest.raises(ResourceExhaustedError):
        runner.forward_chains([ChainInput(tables[0], [1], 4), ChainInput(tables[1], [1], 5)])
    assert [table.length for table in tables] == [0, 0]
    assert runner.cache.pool.used_blocks == 0


def test_a_batch_too_large_for_a_bucket_is_computed(
    models: Models, reference: Reference, traced: Tracer
) -> None:
    runner, text = recording(models("llama"), traced), tokens_of(60)
    for _ in range(3):
        table = runner.new_table()
        assert_close(feed(runner, table, text), reference("llama", text))
        table.free()
    assert (captured_of(runner).num_recorded, traced.replays) == (0, 0)


def test_a_model_that_cannot_be_recorded_is_still_served(
    models: Models, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Step) -> Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner, text = recording(models("llama"), refuse), tokens_of(20)
    table = runner.new_table()
    feed(runner, table, text, want=0)
    for _ in range(4):
        assert_close(feed(runner, table, [3]), reference("llama", [*text, 3])[-1:])
        table.truncate_to(20)
    assert caplog.text.count("cannot be recorded") == 1
    assert "not permitted" in caplog.text
    assert not captured_of(runner).usable


@pytest.mark.parametrize("name", ["torch", "fused_eager"])
def test_recordings_are_compared_before_they_serve(
    models: Models,
    traced: Tracer,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right ones are kept. Wrong ones are not, nor those that return what was there at recording."""

    def spoilt(step: Step) -> Step:
        return lambda: step() * 1.5

    def stuck(step: Step) -> Step:
        recorded = step()
        return lambda: recorded

    def model() -> Any:
        return loading.random_model(models("llama").config, seed=1)

    monkeypatch.setattr("paceline.engine.backends.captured.backend.ROWS", (1, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kept = make_runner(model(), num_blocks=64, block_size=4, backends=[name], new_recorder=lambda: traced)
        assert captured_of(kept).num_recorded == 2
        assert kept.cache.pool.used_blocks == 0
        assert not caplog.text
        for wrong in (lambda: spoilt, lambda: stuck):
            none = make_runner(model(), num_blocks=64, block_size=4, backends=[name], new_recorder=wrong)
            assert none.backend.recordable is not None, "it is not recorded"
            assert "are not recorded: a recorded one gives other logits" in caplog.text
            caplog.clear()
    finally:
        torch.set_num_threads(threads)


def test_recordings_unused_for_long_are_dropped(
    models: Models, traced: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes used in turn must not be recorded again at every use."""
    monkeypatch.setattr("paceline.engine.backends.captured.backend.MAX_RECORDED", 2)
    runner = recording(models("llama"), traced)
    captured = captured_of(runner)
    table = runner.new_table()
    compared = traced.recordings
    for turn in range(2 * PATIENCE_FULL):
        for rows in (1, 2, 3):
            feed(runner, table, [1] * rows)
            table.truncate_to(0)
        assert captured.num_recorded <= 2
        # Two, then one for each that waited long enough for its turn.
        assert traced.recordings - compared <= 2 + 2 * (turn // PATIENCE_FULL)
    assert traced.recordings - compared >= 3


class Unwritten(StaticInputs):
    """Reads what nobody has written, for rows that do not see it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for attention in self._attention.values():
            attention.key_positions.fill_(-1)  # type: ignore[attr-defined]


class Forgetful(StaticInputs):
    """Does not fill up rows: what the last batch had there is written once more."""

    def _rows(self, row: int, token_ids: Indices, start: int) -> None:
        self._ids[row, -len(token_ids) :] = token_ids
        self._positions[row, -len(token_ids) :] = range(start, start + len(token_ids))


class Uncounted(StaticInputs):
    """Leaves the padding sequences as the last batch had them."""

    def _send(self, count: int) -> None:
        self._buffer.send()


@pytest.mark.planted
@pytest.mark.parametrize("bug", [None, "mask", Unwritten, Forgetful, Uncounted], ids=str)
def test_planted_bugs_are_caught(
    models: Models, reference: Reference, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bug == "mask":
        built = AttentionGroup.plan

        def plan(group: AttentionGroup, *args: Any) -> Any:
            """The mask of the batch that was recorded, whatever is replayed."""
            group.fixed = False
            group.first_position = 9
            return built(group, *args)

        monkeypatch.setattr(AttentionGroup, "plan", plan)
    elif bug is not None:
        monkeypatch.setattr("paceline.engine.backends.captured.inputs.StaticInputs", bug)
    tracer = Tracer()
    runner, texts = recording(models("llama"), tracer), [tokens_of(n, seed=n) for n in (9, 33, 70)]
    wrong = False
    for turn, count in itertools.product(range(2), (1, 3)):
        tables = [runner.new_table() for _ in range(count)]
        for text, table in zip(texts, tables, strict=False):
            feed(runner, table, text, want=0)
        for width in (5, 4):
            fed = [tokens_of(width - (i == 1), seed=width + turn) for i in range(count)]
            inputs = [SequenceInput(t, f, len(f)) for t, f in zip(tables, fed, strict=True)]
            logits = runner.forward(inputs)
            rows = [reference("llama", t + f)[-len(f) :] for t, f in zip(texts, fed, strict=False)]
            wrong |= not torch.allclose(logits, torch.cat(rows), atol=1e-4)
            for text, table in zip(texts, tables, strict=False):
                table.truncate_to(len(text))
        for table in reversed(tables):
            table.free()
    assert tracer.replays
    assert wrong == (bug is not None)


@given(
    st.integers(0, 300), st.integers(0, 20), st.integers(1, 5000), st.sampled_from([0, 1, 16, 48]),
    st.integers(20, 5000), st.booleans(),
)  # fmt: skip
def test_a_bucket_holds_its_batch_and_is_idempotent(
    sequences: int, rows: int, keys: int, block_size: int, max_keys: int, in_place: bool
) -> None:
    bucket = bucket_of(sequences, rows, keys, max_keys=max_keys, block_size=block_size, in_place=in_place)
    if bucket is None:
        large = sequences > MAX_SEQUENCES or rows > MAX_ROWS or keys > max_keys
        full = 2 * sequences * max(rows, 1) * 2 > MAX_BATCH_ROWS
        long = not in_place and 2 * sequences * (2 * max(keys, 256) + block_size) > MAX_KEYS
        assert large or full or long or not (sequences and rows)
        return
    assert bucket.sequences >= sequences
    assert bucket.rows >= rows
    assert bucket.keys >= keys
    assert bucket.sequences * bucket.rows <= MAX_BATCH_ROWS
    assert bucket.keys % (block_size or 1) == 0
    assert bucket.scattered == (block_size == 0)
    # Padding at most doubles each of them, but for short sequences.
    assert bucket.sequences < 2 * sequences + 8
    assert bucket.rows < 2 * rows + 1
    assert in_place or bucket.keys < max(2 * keys, 257) + (block_size or 1)


@given(
    st.integers(0, 70), st.integers(0, 70), st.integers(0, 5000), st.integers(0, 70),
    st.sampled_from([1, 16, 48]), st.integers(20, 5000),
)  # fmt: skip
def test_a_bucket_of_trees_holds_its_batch(
    forks: int, rows: int, keys: int, own: int, block_size: int, max_keys: int
) -> None:
    bucket = forked_bucket_of(forks, rows, keys, own, max_keys=max_keys, block_size=block_size)
    if bucket is None:
        large = rows > 1 + MAX_TREE_NODES or own > MAX_OWN or keys > max_keys
        full = 2 * forks * max(2 * rows, 9) > MAX_BATCH_ROWS
        long = 2 * forks * (2 * max(keys, 256) + block_size) > MAX_KEYS
        assert large or full or long or not (forks and rows)
        return
    assert bucket.forks >= forks
    assert bucket.rows >= rows
    assert bucket.keys >= keys
    assert own <= MAX_OWN
    assert bucket.forks * bucket.rows <= MAX_BATCH_ROWS
    assert bucket.keys % block_size == 0
    assert bucket.rows < max(2 * rows, 10)


def test_trees_have_few_buckets() -> None:
    every = itertools.product(range(1, 70), FORKED_ROWS, (2**n for n in range(7, 18)))
    found = {forked_bucket_of(*shape, max_keys=131_072, block_size=16) for shape in every} - {None}
    assert len({(bucket.forks, bucket.rows) for bucket in found if bucket}) == 26
    assert len(found) <= 26 * 8


def test_each_entry_beside_a_table_is_a_bit() -> None:
    seen = [[], [0], [63], [3, 62], [*range(MAX_OWN)]]
    zeros, bits = torch.zeros(1, len(seen), dtype=torch.int64), torch.from_numpy(_bits(seen))[None]
    fixed = FixedForks.of(8, 4, zeros.device)
    own = torch.zeros(2, 1, MAX_OWN, dtype=torch.int64)
    attention = fixed.at(torch.zeros(1, 2, dtype=torch.int64), own, zeros, zeros, zeros + 5, bits)
    assert isinstance(attention, GatheredPass)
    hidden = attention.groups[0].hidden
    assert hidden is not None
    found = [row.logical_not().nonzero()[:, 0].tolist() for row in hidden[0]]
    assert found == [[*range(5), *(8 + place for place in places)] for places in seen]


def test_attention_in_place_has_few_buckets_of_keys() -> None:
    keys = [1, 1000, 1025, 4000, 4096, 4097, 60_000, 131_072]

    def widths(sequences: int) -> list[int]:
        found = (bucket_of(sequences, 1, n, max_keys=131_072, block_size=256, in_place=True) for n in keys)
        return [bucket.keys for bucket in found if bucket is not None]

    assert widths(1) == widths(8) == [1024, 1024, 4096, 4096, 4096, 16384, 65536, 131_072]
    assert widths(9) == [131_072] * len(keys)


@pytest.mark.parametrize("name", ["torch", "fused_eager"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_step_stays_on_its_device_without_reads(models: Models, kind: str, name: str) -> None:
    """Sequences, branches and loops on a device whose tensors hold nothing."""
    layers = inspect_attention(models(kind))
    with torch.device("meta"):
        model = loading.prepare(type(models(kind))(models(kind).config))
    cache = PagedCache(layers, num_blocks=64, block_size=4, device="meta")
    results: list[Tensor] = []

    def recorder(step: Step) -> Step:
        step()
        return lambda: results.append(step()) or results[-1]  # type: ignore[func-returns-value]

    runner = recording_runner(model, cache, recorder, name)
    tables = [runner.new_table() for _ in range(3)]
    for _ in range(1 + PATIENCE):
        logits = runner.forward([SequenceInput(t, [1, 2, 3][: i + 1], 1) for i, t in enumerate(tables)])
        assert (logits.shape, logits.device.type) == ((3, VOCAB), "meta")
    assert len(results) == 1
    tree = Tree(runner, [1, 2, 3, 4])
    tree.open(4)
    tree.open(2)
    for _ in range(1 + PATIENCE):
        inputs = [BranchInput(branch, 1) for branch, _ in tree.branches]
        assert runner.forward_branches(inputs).shape == (2, VOCAB)
    assert len(results) == 2
    chains = [ChainInput(t, [1], 3, 1.0, CoupledNoise(2**64 - 1, t.length + 1), num_others=4) for t in tables]
    assert runner.forward_chains(chains) == [Chain(())] * 3
    with pytest.raises(NotImplementedError, match="no data"):
        # All but the one copy to the host.
        runner.forward_chains(chains)
    assert results[-1].shape == (4, 3, 1 + 1 + 1 + 4)
