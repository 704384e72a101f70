"""The compiled pass gives transformers' logits, and the same bits in any batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.decoding.noise import CoupledNoise, gumbel
from paceline.decoding.sampling import check_sparse
from paceline.decoding.support import draw_sparse
from paceline.engine.backends.compiled import gemm, tiles, vectors, weights
from paceline.engine.backends.compiled.chain import decoder_chain
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import SequenceInput
from paceline.engine.loading import model as loading
from paceline.engine.loading.model import inspect_attention, make_runner, random_model
from paceline.engine.multi_step import Chain, ChainInput, SparseDraws
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable, Branch, Branching
from tests.unit.engine.runners import runner_of

Make = Callable[[str], Any]

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
WIDE = SHAPE | {"hidden_size": 112, "num_attention_heads": 7, "head_dim": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama, four heads a group": lambda: LlamaConfig(**SHAPE, num_key_value_heads=1),
    "llama, two": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama, one, tied": lambda: LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "llama, three": lambda: LlamaConfig(
        **(SHAPE | {"hidden_size": 96, "num_attention_heads": 6}), num_key_value_heads=2
    ),
    "llama, llama3 rope": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "llama, yarn rope": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=7),
    "qwen2, seven": lambda: Qwen2Config(**WIDE, num_key_value_heads=1),
    "qwen2, a window in one layer": lambda: Qwen2Config(
        **SHAPE,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, num_key_value_heads=2),
}


def model_of(name: str) -> Any:
    """Fresh models have gains of one and biases of zero, which no pass could confuse."""
    model = random_model(CONFIGS[name]())
    generator = torch.Generator().manual_seed(3)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def in_halves(name: str) -> Any:
    """Its matrices hold bfloat16 numbers, as a checkpoint's do; its norms need not."""
    model = model_of(name)
    for parameter_name, parameter in model.named_parameters():
        if "norm" not in parameter_name:
            parameter.data = parameter.data.bfloat16().float()
    return model


def compiled(name: str, make: Make = model_of) -> ModelRunner:
    runner = make_runner(make(name), num_blocks=64, block_size=4, backends=BACKENDS)
    assert runner.backend.skills.row_invariant
    return runner


@pytest.mark.parametrize("make", [model_of, in_halves])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_equals_transformers_on_ragged_batches(name: str, make: Make) -> None:
    """Prefill, chunks, decode and verification rows, batches in which sequences come and go."""
    modules = make_runner(make(name), num_blocks=64, block_size=4)
    runners = (modules, compiled(name, make))
    rng = random.Random(5)
    tables = {runner: [runner.new_table() for _ in range(3)] for runner in runners}
    for _ in range(8):
        members = rng.sample(range(3), rng.randint(1, 3))
        tokens = {i: [rng.randrange(97) for _ in range(rng.choice([1, 1, 4, 9]))] for i in members}
        wanted = {i: rng.randint(0, len(tokens[i])) for i in members}
        logits = [
            runner.forward([SequenceInput(tables[runner][i], tokens[i], wanted[i]) for i in members])
            for runner in runners
        ]
        torch.testing.assert_close(logits[0], logits[1], atol=3e-5, rtol=1e-5)
        cut = rng.choice(members)
        for runner in runners:
            table = tables[runner][cut]
            table.truncate_to(max(0, table.length - 2))


@pytest.mark.parametrize("make", [model_of, in_halves])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_batch(name: str, make: Make) -> None:
    """Alone, in one prefill, in chunks, in verification rows, among other sequences."""
    runner = compiled(name, make)
    rng = random.Random(7)
    tokens = [rng.randrange(97) for _ in range(60)]
    table = runner.new_table()
    together = runner.forward([SequenceInput(table, tokens, 60)])
    table.truncate_to(0)
    alone = torch.cat([runner.forward([SequenceInput(table, [t], 1)]) for t in tokens])
    assert torch.equal(together, alone)
    table.truncate_to(0)
    mates = [runner.new_table() for _ in range(4)]
    for mate in mates:
        runner.forward([SequenceInput(mate, [rng.randrange(97) for _ in range(rng.randint(1, 9))], 0)])
    at = 0
    while at < 60:
        count = min(rng.choice([1, 2, 3, 5, 6, 7, 13, 23]), 60 - at)
        inputs = [SequenceInput(mate, [rng.randrange(97)] * rng.randint(1, 3), 1) for mate in mates]
        place = rng.randrange(5)
        inputs.insert(place, SequenceInput(table, tokens[at : at + count], count))
        logits = runner.forward(inputs)
        assert torch.equal(logits[place : place + count], together[at : at + count])
        at += count
        for mate in mates:
            mate.truncate_to(1)


def test_an_abandoned_pass_leaves_no_trace() -> None:
    """Abandoned before it begins; the same tokens fed again give the same bits."""
    runner, cancel = compiled("llama, two"), CancelToken()
    tables = [runner.new_table(), runner.new_table()]
    whole = runner.forward([SequenceInput(tables[0], [5, 6, 7], 2)])
    runner.forward([SequenceInput(tables[1], [5, 6], 1)])
    used = runner.cache.pool.used_blocks
    cancel.cancel()
    assert runner.cancellable
    assert runner.forward_cancellable([SequenceInput(tables[1], [7] * 9, 9)], cancel) is None
    assert (tables[1].length, runner.cache.pool.used_blocks) == (2, used)
    cancel.reset()
    again = runner.forward_cancellable([SequenceInput(tables[1], [7], 1)], cancel)
    assert again is not None
    assert torch.equal(again, whole[1:])
    assert tables[1].length == 3
    assert not make_runner(model_of("llama, two"), num_blocks=8).cancellable


def test_logits_have_exactly_the_vocabularys_width() -> None:
    runner = compiled("llama, two")
    assert runner.forward([SequenceInput(runner.new_table(), [1, 2], 1)]).shape == (1, 97)
    assert runner.forward([SequenceInput(runner.new_table(), [1, 2], 0)]).shape == (0, 97)


@pytest.mark.parametrize("name", ["llama, two", "llama, one, tied"])
def test_the_model_gives_up_its_weights(name: str) -> None:
    """All but the embedding, which is looked up."""
    model = model_of(name)
    make_runner(model, num_blocks=8, backends=BACKENDS)
    layer = model.model.layers[1]
    projections = (*layer.self_attn.children(), *layer.mlp.children())
    assert all(p.weight.numel() == 0 for p in projections if hasattr(p, "weight"))
    assert model.model.embed_tokens.weight.shape == (97, 64)
    assert (model.lm_head.weight.numel() > 0) == ("tied" in name)


@pytest.mark.parametrize("place", ["embed_tokens", "lm_head", "q_proj", "v_proj", "down_proj"])
def test_a_broken_weight_gives_nan_logits(place: str) -> None:
    """NaN in a weight that a row uses is NaN in its logits."""
    model = model_of("llama, two")
    for name, parameter in model.named_parameters():
        if place in name:
            parameter.data[3] = float("nan")
    layers = inspect_attention(model)
    cache = loading.PagedCache(layers, num_blocks=8, block_size=4)
    runner = runner_of(model, cache, "compiled")
    logits = runner.forward([SequenceInput(runner.new_table(), [3, 3], 1)])
    assert torch.isnan(logits).any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("longest", [2, 4, 7])
def test_a_short_model_is_compared_on_more_tokens(
    threads: int, longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The tables of positions must be long enough for the comparison."""
    torch.set_num_threads(threads)
    runner = make_runner(model_of("llama, two"), num_blocks=8, max_model_len=longest, backends=BACKENDS)
    assert runner.max_model_len == longest
    assert runner.backend.skills.row_invariant is (threads == 1)
    assert "is not served" not in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, num_key_value_heads=2, mlp_bias=True),
        LlamaConfig(**(SHAPE | {"head_dim": 8}), num_key_value_heads=2),
        LlamaConfig(**(SHAPE | {"hidden_size": 40}), num_key_value_heads=2),
    ],
    ids=["biases of the MLP", "narrow heads", "odd width"],
)
def test_unsupported_models_take_another_backend(config: Any) -> None:
    runner = make_runner(random_model(config), num_blocks=8, backends=BACKENDS)
    assert not runner.backend.skills.row_invariant
    assert not weights.fits(random_model(config))


@pytest.mark.parametrize("reason", ["threads", "dtype"])
def test_unsuitable_workers_take_another_backend(reason: str) -> None:
    if reason == "threads":
        torch.set_num_threads(2)
    dtype = torch.bfloat16 if reason == "dtype" else torch.float32
    model = random_model(CONFIGS["llama, two"](), dtype=dtype)
    assert not make_runner(model, num_blocks=8, backends=BACKENDS).backend.skills.row_invariant


def test_determinism_is_kept_or_refused() -> None:
    """With more threads too: the pass uses one of them."""
    torch.set_num_threads(2)
    model = random_model(CONFIGS["llama, two"]())
    assert make_runner(
        model, num_blocks=8, backends=BACKENDS, deterministic=True
    ).backend.skills.row_invariant
    half = random_model(CONFIGS["llama, two"](), dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="bfloat16 on cpu") as refusal:
        make_runner(half, num_blocks=8, backends=BACKENDS, deterministic=True)
    assert refusal.value.field == "deterministic"


@pytest.mark.planted
def test_a_wrong_pass_is_rejected_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: keys and values are those of the queries. Another backend serves, unharmed."""
    monkeypatch.setattr(weights, "_inputs", lambda attention: (attention.q_proj,) * 3)
    config = LlamaConfig(**SHAPE, num_key_value_heads=4)
    runner = make_runner(random_model(config), num_blocks=8, backends=BACKENDS)
    assert not runner.backend.skills.row_invariant
    assert "is not served by the backend compiled" in caplog.text
    expected = make_runner(random_model(config), num_blocks=8)
    logits = [r.forward([SequenceInput(r.new_table(), [1, 2, 3], 3)]) for r in (expected, runner)]
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-5)


@njit
def _exponentials(values: Any) -> Any:
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = vectors.exp(values[i])
    return out


def test_the_exponential_is_exact_to_its_last_places() -> None:
    values = -np.linspace(0, 87, 100_001, dtype=np.float32)
    found = _exponentials(values)
    assert np.abs(found / np.exp(values.astype(np.float64)) - 1).max() < 2e-7
    edges = _exponentials(np.array([0.0, -0.0, -1e30, -np.inf, np.nan], dtype=np.float32))
    assert edges[0] == edges[1] == 1
    assert (edges[2:4] < 1e-37).all()
    assert np.isnan(edges[4])


@pytest.mark.parametrize(("most", "wide", "beside"), [(6, 1, False), (3, 2, False), (6, 4, True)])
def test_a_products_rows_are_independent_of_sharing(most: int, wide: int, beside: bool) -> None:
    """For every number of rows that processors with and without AVX-512 take together."""
    add = tiles._sum_of_products(most, wide=wide, beside=beside, adds=True)
    n, width = 37, 8 * vectors.LANES

    @njit
    def product(x: Any, w: Any, out: Any, first: int, rows: int) -> None:
        inputs, outputs = vectors.address_of(x, first * n), vectors.address_of(out, first * width)
        weights, apart = vectors.address_of(w, 0), n * vectors.LANES
        add(inputs, n, weights, n, outputs, width, rows, width // vectors.LANES, apart, apart, 1 << 15)

    rng = np.random.default_rng(3)
    x, w, before = (
        rng.standard_normal(size, dtype=np.float32)
        for size in ((most, n), (8, n, vectors.LANES), (most, width))
    )
    laid_out = w.reshape(-1, wide, n, vectors.LANES).transpose(0, 2, 1, 3) if beside else w
    words, alone = laid_out.ravel().view(np.uint32), before.copy()
    for r in range(most):
        product(x.ravel(), words, alone.reshape(-1), r, 1)
    exact = before + x.astype(np.float64) @ w.transpose(1, 0, 2).reshape(n, width)
    np.testing.assert_allclose(alone, exact, rtol=0, atol=1e-5)
    for rows in range(1, most + 1):
        out = before.copy()
        product(x.ravel(), words, out.reshape(-1), 0, rows)
        assert np.array_equal(out[:rows], alone[:rows])
        assert np.array_equal(out[rows:], before[rows:])


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("tiles_of_outputs", [1, 2, 5, 8])
def test_a_rows_product_is_the_same_for_any_row_count(tiles_of_outputs: int, halves: bool) -> None:
    """One tile at a time, two, or a wide one; all rows at once or some after the others; odd tiles last."""
    n, width, most, apart = 152, tiles_of_outputs * vectors.LANES, 40, 3
    rng = np.random.default_rng(4)
    x = rng.standard_normal((most, n + apart), dtype=np.float32)
    matrix = torch.from_numpy(rng.standard_normal((width, n), dtype=np.float32)).bfloat16().float()
    w = np.concatenate([np.zeros(7, dtype=np.uint32), weights._tiles(matrix, halves)])
    before = rng.standard_normal((most, width + apart), dtype=np.float32)

    def product(first: int, rows: int) -> Any:
        out = before[first : first + rows].copy()
        inputs = x[first:].reshape(-1)
        end = gemm.matrix_product(
            inputs, n + apart, w, halves, 7, n, width, out.reshape(-1), width + apart, rows
        )
        assert end == len(w)
        return out

    alone = np.concatenate([product(r, 1) for r in range(most)])
    exact = before[:, :width] + x[:, :n].astype(np.float64) @ matrix.double().numpy().T
    np.testing.assert_allclose(alone[:, :width], exact, rtol=0, atol=1e-4)
    for rows in range(1, most + 1):
        assert np.array_equal(product(0, rows), alone[:rows])


def test_arrays_are_aligned_to_cache_lines() -> None:
    for words in (1, 7, 100_000, 262_143):
        assert weights.aligned(words).ctypes.data % 64 == 0
        assert len(weights.aligned(words)) == words


def test_large_arrays_are_aligned_to_huge_pages() -> None:
    for words in (262_144, 800_000, 3_000_000):
        assert weights.aligned(words).ctypes.data % (2 << 20) == 0
        assert len(weights.aligned(words)) == words


# ---- weights that are bfloat16 numbers -----------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_16_bit_weights_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prefill, of a step, of more rows than share a read; and those of the modules but for rounding."""
    modules = make_runner(in_halves(name), num_blocks=64, block_size=4)
    halves = make_runner(in_halves(name), num_blocks=64, block_size=4, backends=BACKENDS)
    monkeypatch.setattr(weights, "_is_bfloat16", lambda weight: False)
    wide = make_runner(in_halves(name), num_blocks=64, block_size=4, backends=BACKENDS)
    assert halves.backend.skills.row_invariant
    assert 0 < 2 * halves.backend.weight_bytes == wide.backend.weight_bytes
    rng = random.Random(11)
    tables = {runner: [runner.new_table() for _ in range(2)] for runner in (modules, halves, wide)}
    for counts in ([40, 3], [1, 1], [5, 9], [1, 0]):
        tokens = [[rng.randrange(97) for _ in range(count)] for count in counts]
        logits = {
            runner: runner.forward(
                [SequenceInput(table, fed, len(fed)) for table, fed in zip(own, tokens, strict=True) if fed]
            )
            for runner, own in tables.items()
        }
        assert torch.equal(logits[halves], logits[wide])
        torch.testing.assert_close(logits[halves], logits[modules], atol=3e-5, rtol=1e-5)


def test_one_non_bfloat16_weight_keeps_all_whole() -> None:
    model = in_halves("llama, two")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 0.1
    whole = make_runner(model, num_blocks=8, backends=BACKENDS)
    assert (
        whole.backend.weight_bytes
        == 2 * make_runner(in_halves("llama, two"), num_blocks=8, backends=BACKENDS).backend.weight_bytes
    )


@pytest.mark.planted
@pytest.mark.parametrize("fault", ["order", "upper", "turned"])
def test_wrongly_packed_weights_are_rejected_at_start(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: an input's weight and the next one's change places, one is missing, or all are reversed."""
    packed = weights._tiles
    faults: dict[str, Callable[[Any], Any]] = {
        "order": lambda words: words >> 16 | words << 16,
        "upper": lambda words: words & 0xFFFF0000,
        "turned": lambda words: words[::-1].copy(),
    }
    monkeypatch.setattr(weights, "_tiles", lambda weight, halves: faults[fault](packed(weight, halves)))
    assert not make_runner(
        in_halves("llama, two"), num_blocks=8, backends=BACKENDS
    ).backend.skills.row_invariant
    assert "is not served by the backend compiled" in caplog.text


# ---- chains --------------------------------------------------------------------------------------------


def one_by_one(runner: ModelRunner, item: ChainInput) -> Chain:
    """The same chain from single passes, on a table."""
    assert isinstance(item.end, BlockTable)
    feed, tokens, supports, others, margins = list(item.token_ids), [], [], [], []
    for step in range(item.steps):
        logits = runner.forward([SequenceInput(item.end, feed, 1)])
        row = logits[0].double()
        if item.noise is not None:
            row = row / item.temperature + gumbel([item.noise.seed], [item.noise.first + step], 97)[0]
        token = int(row.argmax())
        if item.draws is not None:
            u = torch.from_numpy(item.draws.uniforms[step : step + 1])
            scores = logits / torch.tensor(item.temperature)
            (token,), found = draw_sparse(scores, u, item.draws.mass, item.draws.bound)
            supports += found
        best = row.topk(item.num_others + 1).indices.tolist()
        others.append(tuple([t for t in best if t != token][: item.num_others]))
        # What is drawn is ranked by its scores, too.
        ranked = row / item.temperature if item.draws is not None else row
        margins += [float(ranked[token] - ranked[o[0]]) for o in others[-1:] if o]
        tokens.append(token)
        feed = [token]
    return Chain(tokens, supports, *((tuple(others), margins) if item.num_others else ()))


def assert_same(chain: Chain, wanted: Chain) -> None:
    """Equal, their margins but for rounding."""
    assert dataclasses.replace(chain, margins=wanted.margins) == wanted
    assert chain.margins == pytest.approx(wanted.margins, abs=1e-5)


@pytest.mark.parametrize("make", [model_of, in_halves])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_equals_single_passes(name: str, make: Make) -> None:
    """Greedy, with noise and drawn from a support, of several lengths, after one token and after more.

    The cache afterwards has the same bits, and so has every distribution.
    """
    runner, rng, noise = compiled(name, make), random.Random(11), np.random.default_rng(4)
    items = []
    for steps, temperature, support in (
        (2, 0.0, None),
        (5, 0.7, None),
        (5, 0.0, None),
        (5, 0.7, (0.9, 1024)),
        (4, 1.0, (1.0, 20)),
        (1, 1.3, None),
        (1, 1.3, (0.5, 97)),
    ):
        table = runner.new_table()
        runner.forward([SequenceInput(table, [rng.randrange(97) for _ in range(rng.randint(1, 17))], 0)])
        chooses = temperature and support is None
        coupled = CoupledNoise(rng.randrange(2**64), table.length) if chooses else None
        draws = None if support is None else SparseDraws(noise.random(steps), *support)
        feed = [rng.randrange(97) for _ in range(rng.choice((1, 1, 2, 7)))]
        items.append(ChainInput(table, feed, steps, temperature, coupled, draws, rng.choice((0, 3))))
    lengths = [item.end.length for item in items]
    chains = runner.forward_chains(items)
    grown = [item.end.length - n - len(item.token_ids) + 1 for item, n in zip(items, lengths, strict=True)]
    assert grown == [2, 5, 5, 5, 4, 1, 1]
    after = [runner.forward([SequenceInput(item.end, [3], 1)]) for item in items]
    for item, n, chain, logits in zip(items, lengths, chains, after, strict=True):
        item.end.truncate_to(n)
        assert_same(chain, one_by_one(runner, item))
        assert len(chain.distributions) == (item.steps if item.draws else 0)
        if item.draws is not None:
            check_sparse(chain.distributions, 97, chain.token_ids)
        assert torch.equal(runner.forward([SequenceInput(item.end, [3], 1)]), logits)


@pytest.mark.parametrize("name", ["llama, two", "mistral"])
def test_a_chain_on_a_branch_equals_one_on_a_table(name: str) -> None:
    """Side by side over one prefix, one after entries of its own; adopted it is the sequence."""
    runner, rng = compiled(name), random.Random(4)
    text = [rng.randrange(97) for _ in range(19)]
    table = runner.new_table()
    runner.forward([SequenceInput(table, text, 0)])
    region = Branching(table, 40)
    parent = region.branch(19)
    runner.forward_chains([ChainInput(parent, [5], 1)])
    seed = rng.randrange(2**64)
    items, expected = [], []
    for kept, prefix, steps, temperature in (
        (19, [], 4, 0.0),
        (19, [], 2, 0.8),
        (12, [], 5, 0.8),
        (19, [5], 3, 0.0),
        (0, [], 1, 1.2),
    ):
        noise = CoupledNoise(seed, kept + len(prefix) + 1) if temperature else None
        branch = region.branch(19, parent) if prefix else region.branch(kept)
        items.append(ChainInput(branch, [7], steps, temperature, noise, num_others=2))
        alone = runner.new_table()
        if kept + len(prefix):
            runner.forward([SequenceInput(alone, [*text[:kept], *prefix], 0)])
        expected.append(one_by_one(runner, dataclasses.replace(items[-1], end=alone)))
    for chain, wanted in zip(runner.forward_chains(items), expected, strict=True):
        assert_same(chain, wanted)
    assert [item.end.length for item in items] == [23, 21, 17, 23, 1]
    chosen = items[3].end
    assert isinstance(chosen, Branch)
    runner.adopt(chosen)
    more = runner.forward([SequenceInput(table, [9], 1)])
    other = runner.new_table()
    tokens = [*text, 5, 7, *expected[3].token_ids[:-1], 9]
    assert torch.equal(runner.forward([SequenceInput(other, tokens, 1)]), more)


def test_a_chain_told_to_stop_ends_with_its_step() -> None:
    """It can be continued afterwards."""
    runner, cancel = compiled("llama, two"), CancelToken()
    expected = one_by_one(runner, ChainInput(runner.new_table(), [3], 6))
    region = Branching(runner.new_table(), 6)
    for end in (runner.new_table(), region.branch(0)):
        cancel.cancel()
        (first,) = runner.forward_chains([ChainInput(end, [3], 6)], cancel)
        assert list(first.token_ids) == list(expected.token_ids[:1])
        assert end.length == 1
        cancel.reset()
        (rest,) = runner.forward_chains([ChainInput(end, first.token_ids, 5)], cancel)
        assert [*first.token_ids, *rest.token_ids] == expected.token_ids
        assert end.length == 6


@pytest.mark.parametrize("layers", [2, 4])
def test_a_running_chain_is_stopped(layers: int) -> None:
    """The compiled loop checks the flag at every step and within a step: with four layers the first one
    notices it in time. An abandoned step is repeated with the same result. The flag lies where the sixth
    step writes, as a thread could not set it in time."""
    model = random_model(LlamaConfig(**(SHAPE | {"num_hidden_layers": layers}), num_key_value_heads=2))
    runner, cancel = make_runner(model, num_blocks=64, block_size=4, backends=BACKENDS), CancelToken()
    assert runner.cache.flat is not None
    entries = runner.cache.flat.numpy().reshape(-1).view(np.int8)

    def drawn(steps: int) -> list[int]:
        entries[:] = 0
        with runner.new_table() as table:
            (chain,) = runner.forward_chains([ChainInput(table, [3], steps)], cancel)
            first = list(chain.token_ids)
            assert table.length == len(first)
            if len(first) < steps:
                cancel.flag = np.zeros(1, dtype=np.int8)
                (rest,) = runner.forward_chains([ChainInput(table, first[-1:], steps - len(first))])
                assert [*first, *rest.token_ids] == expected[:steps]
        return first

    expected = drawn(120)
    assert drawn(5) == expected[:5]
    free = entries == 0
    assert drawn(6) == expected[:6]
    at = int(np.flatnonzero(free & (entries != 0))[0])
    cancel.flag = entries[at : at + 1]
    assert len(drawn(120)) == (6 if layers == 2 else 5)
    assert decoder_chain.targetoptions["nogil"], "another thread can set it meanwhile"


def test_the_lowest_id_of_equal_logits_is_chosen() -> None:
    model = model_of("llama, two")
    model.lm_head.weight.data[7:] = model.lm_head.weight.data[7]
    runner = make_runner(model, num_blocks=32, block_size=4, backends=BACKENDS)
    chains = runner.forward_chains([ChainInput(runner.new_table(), [t], 3) for t in range(20)])
    assert {token for own in chains for token in own.token_ids} <= set(range(8))


@pytest.mark.parametrize("drawn", [False, True])
def test_a_chain_ends_at_broken_logits(drawn: bool) -> None:
    """A token whose embedding is no number has no successor; other chains go on."""
    model = model_of("llama, two")
    model.lm_head.weight.data[50] = 100 * model.lm_head.weight.data[50]
    model.model.embed_tokens.weight.data[50] = torch.nan
    runner = make_runner(model, num_blocks=64, block_size=4, backends=BACKENDS)
    tables = [runner.new_table() for _ in range(20)]
    draws = SparseDraws(np.full(6, 0.5), 0.9, 64) if drawn else None
    inputs = [ChainInput(table, [t], 6, float(drawn), draws=draws) for t, table in enumerate(tables)]
    chains = runner.forward_chains(inputs)
    assert any(50 in chain.token_ids for chain in chains)
    for table, chain in zip(tables, chains, strict=True):
        tokens = chain.token_ids
        assert len(chain.distributions) == len(tokens) * drawn
        assert 50 not in tokens[:-1]
        assert len(tokens) == 6 or tokens[-1] == 50
        assert table.length == len(tokens)


def test_without_blocks_a_chain_changes_nothing() -> None:
    runner = make_runner(model_of("llama, two"), num_blocks=2, block_size=4, backends=BACKENDS)
    tables = [runner.new_table(), runner.new_table()]
    with pytest.raises(ResourceExhaustedError):
        runner.forward_chains([ChainInput(tables[0], [1], 4), ChainInput(tables[1], [1], 5)])
    assert [table.length for table in tables] == [0, 0]
    assert runner.cache.pool.used_blocks == 0
