"""The runner's logits against plain transformers, whatever the batch, the blocks and the history."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from paceline.core.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from paceline.engine.backends import attention
from paceline.engine.backends.cache_attention.group import AttentionGroup
from paceline.engine.backends.modules import ModulesForward
from paceline.engine.cache import LayerLayout
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import make_runner, prepare, random_model
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable

VOCAB = 97
MAX_LEN = 128
TOLERANCE = 2e-5
"""Of float32 logits of about 1: sums of another order differ by 1.2e-5 on some processors."""

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,  # large enough for attention to matter at this size
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, num_key_value_heads=2),
    "qwen2": lambda: Qwen2Config(**COMMON, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**COMMON, num_key_value_heads=1, head_dim=16),
    "mistral": lambda: MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=7),
    "gemma2": lambda: Gemma2Config(
        **COMMON, num_key_value_heads=2, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0
    ),
    # Its layers do not pass keyword arguments on to their attention.
    "stablelm": lambda: StableLmConfig(**COMMON, num_key_value_heads=2),
    # Keys and values of different sizes.
    "deepseek": lambda: DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=2,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON),
    # Some layers have the keys and values of others, and rows that are wanted by their number alone.
    "gemma4": lambda: Gemma4TextConfig(
        **(COMMON | {"num_hidden_layers": 4}),
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    ),
}


@pytest.fixture(scope="module")
def models() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = random_model(CONFIGS[name](), seed=1)
        return made[name]

    return get


@pytest.fixture(scope="module")
def reference(models: Callable[[str], Any]) -> Callable[[str, Sequence[int]], torch.Tensor]:
    """Logits [len, vocab] of a whole sequence in plain transformers, eager attention."""
    made: dict[str, Any] = {}

    def logits(name: str, tokens: Sequence[int]) -> torch.Tensor:
        if name not in made:
            twin = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
            twin.load_state_dict(models(name).state_dict())
            made[name] = twin
        with torch.inference_mode():
            result: torch.Tensor = made[name](torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return result

    return logits


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def feed(
    runner: ModelRunner, table: BlockTable, tokens: Sequence[int], want: int | None = None
) -> torch.Tensor:
    return runner.forward([SequenceInput(table, tokens, len(tokens) if want is None else want)])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


Models = Callable[[str], Any]
Reference = Callable[[str, Sequence[int]], torch.Tensor]


@pytest.mark.parametrize("block_size", [1, 16, MAX_LEN])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_decode_and_verification_equal_transformers(
    name: str, block_size: int, models: Models, reference: Reference
) -> None:
    runner = make_runner(models(name), num_blocks=512 // block_size, block_size=block_size)
    tokens = tokens_of(60)
    expected = reference(name, tokens)

    prompt = runner.new_table()
    assert_close(feed(runner, prompt, tokens[:20], want=1), expected[19:20])
    prompt.free()

    whole = runner.new_table()
    assert_close(feed(runner, whole, tokens), expected)

    parts = runner.new_table()
    assert feed(runner, parts, tokens[:21], want=0).shape == (0, VOCAB)
    assert_close(feed(runner, parts, tokens[21:40], want=2), expected[38:40])
    for i in range(40, 44):
        assert_close(feed(runner, parts, tokens[i : i + 1]), expected[i : i + 1])
    assert_close(feed(runner, parts, tokens[44:49]), expected[44:49])
    assert parts.length == 49


@pytest.mark.parametrize("block_size", [1, 16, MAX_LEN])
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batch_equals_transformers_in_any_order(
    name: str, block_size: int, models: Models, reference: Reference
) -> None:
    """Prefill chunks, decodes and verifications of many sequences, in one pass, in two orders."""
    runner = make_runner(models(name), num_blocks=2048 // block_size, block_size=block_size)
    # (length before, tokens fed, logits wanted)
    plan = [
        (0, 40, 1),
        (50, 1, 1),
        (3, 5, 5),
        (30, 5, 5),
        (12, 1, 1),
        (0, 3, 0),
        (70, 4, 4),
        (20, 40, 0),
        (0, 1, 1),
    ]
    sequences = [tokens_of(before + n, seed=i) for i, (before, n, _) in enumerate(plan)]
    tables = [runner.new_table() for _ in plan]
    # Block by block in turn, so that the tables lie interleaved and must be gathered.
    for start in range(0, 70, 10):
        batch = [
            SequenceInput(table, tokens[start : min(start + 10, before)], 0)
            for table, tokens, (before, _, _) in zip(tables, sequences, plan, strict=True)
            if before > start
        ]
        runner.forward(batch)
    expected = [
        reference(name, tokens)[len(tokens) - want :]
        for tokens, (_, _, want) in zip(sequences, plan, strict=True)
    ]
    for seed in (None, 3):
        order = list(range(len(plan)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        logits = runner.forward(
            [SequenceInput(tables[i], sequences[i][plan[i][0] :], plan[i][2]) for i in order]
        )
        assert logits.dtype == torch.float32
        assert_close(logits, torch.cat([expected[i] for i in order]))
        for table, (before, n, _) in zip(tables, plan, strict=True):
            assert table.length == before + n
            table.truncate_to(before)
    runner.cache.pool.check_integrity()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_batch_of_equal_decodes_needs_no_padding(name: str, models: Models, reference: Reference) -> None:
    runner = make_runner(models(name), num_blocks=64)
    sequences = [tokens_of(30, seed=i) for i in range(6)]
    tables = [runner.new_table() for _ in sequences]
    runner.forward([SequenceInput(t, s[:25], 0) for t, s in zip(tables, sequences, strict=True)])
    logits = runner.forward([SequenceInput(t, s[25:], 5) for t, s in zip(tables, sequences, strict=True)])
    assert_close(logits, torch.cat([reference(name, s)[25:] for s in sequences]))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("block_size", [1, 16, MAX_LEN])
def test_rollback_and_continuation_equal_a_fresh_run(
    name: str, block_size: int, models: Models, reference: Reference
) -> None:
    runner = make_runner(models(name), num_blocks=512 // block_size, block_size=block_size)
    table = runner.new_table()
    prefix, wrong, right = tokens_of(33), tokens_of(6, seed=8), tokens_of(6, seed=9)
    feed(runner, table, prefix, want=0)
    feed(runner, table, wrong)
    table.truncate_to(35)  # two of the six drafts accepted
    expected = reference(name, prefix + wrong[:2] + right)[35:]
    assert_close(feed(runner, table, right), expected)
    table.truncate_to(0)
    assert_close(feed(runner, table, right), reference(name, right))


def test_a_full_cache_leaves_everything_unchanged(models: Models) -> None:
    runner = make_runner(models("llama"), num_blocks=5)
    first, second = runner.new_table(), runner.new_table()
    feed(runner, first, tokens_of(30), want=0)
    feed(runner, second, tokens_of(17), want=0)
    before = [tensor.clone() for tensor in (*runner.cache.keys, *runner.cache.values)]
    state = [(t.length, t.blocks, t.reserved) for t in (first, second)]
    with pytest.raises(ResourceExhaustedError):
        runner.forward([SequenceInput(first, tokens_of(5), 1), SequenceInput(second, tokens_of(20), 1)])
    assert state == [(t.length, t.blocks, t.reserved) for t in (first, second)]
    assert runner.cache.pool.free_blocks == 1
    runner.cache.pool.check_integrity()
    for old, new in zip(before, (*runner.cache.keys, *runner.cache.values), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())
    assert feed(runner, first, tokens_of(5)).shape == (5, VOCAB)


def test_a_failing_pass_leaves_the_tables_unchanged(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(models("llama"), num_blocks=5)
    table = runner.new_table()
    feed(runner, table, tokens_of(16), want=0)

    def fail(batch: object) -> torch.Tensor:
        raise InternalError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(runner.backend, "_forward", fail)
        with pytest.raises(InternalError):
            feed(runner, table, tokens_of(5))
    assert (table.length, len(table.blocks)) == (16, 1)


def test_a_sequence_of_nan_does_not_affect_others(models: Models, reference: Reference) -> None:
    """Also not through blocks it leaves behind, nor through padding."""
    runner = make_runner(models("llama"), num_blocks=12)
    poisoned, sane = runner.new_table(), runner.new_table()
    feed(runner, poisoned, tokens_of(40), want=0)
    tokens = tokens_of(20)
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(float("nan"))
    feed(runner, sane, tokens[:15], want=0)
    logits = runner.forward([SequenceInput(poisoned, [1, 2, 3], 1), SequenceInput(sane, tokens[15:], 5)])
    assert logits[0].isnan().all()
    assert_close(logits[1:], reference("llama", tokens)[15:])
    poisoned.free()
    again = runner.new_table()
    logits = runner.forward([SequenceInput(again, tokens[:3], 3), SequenceInput(sane, [5], 1)])
    assert_close(logits[:3], reference("llama", tokens)[:3])


def test_logits_are_cut_to_the_vocabulary(models: Models, reference: Reference) -> None:
    runner = make_runner(models("llama"), num_blocks=8)
    cut = ModelRunner(runner.model, runner.cache, runner.backend, vocab_size=90)
    tokens = tokens_of(9)
    assert_close(feed(cut, cut.new_table(), tokens), reference("llama", tokens)[:, :90])


@pytest.mark.parametrize(
    ("tokens", "want", "field"),
    [
        ([], 0, "token_ids"),
        ([1], 2, "num_logits"),
        ([1], -1, "num_logits"),
        ([1] * (MAX_LEN + 1), 1, "token_ids"),
        ([1, VOCAB], 1, "token_ids"),
        ([-1], 1, "token_ids"),
    ],
)
def test_malformed_inputs_are_refused(tokens: list[int], want: int, field: str, models: Models) -> None:
    runner = make_runner(models("llama"), num_blocks=32)
    table = runner.new_table()
    with pytest.raises(InvalidArgumentError) as caught:
        runner.forward([SequenceInput(table, tokens, want)])
    assert caught.value.field == field
    assert runner.cache.pool.used_blocks == 0


def test_a_sequence_twice_in_a_batch_is_refused(models: Models) -> None:
    runner = make_runner(models("llama"), num_blocks=4)
    table = runner.new_table()
    with pytest.raises(InvalidArgumentError, match="only once"):
        runner.forward([SequenceInput(table, [1], 1), SequenceInput(table, [2], 1)])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        runner.forward([])
    with pytest.raises(InvalidArgumentError, match="another cache"):
        feed(make_runner(models("llama"), num_blocks=4), table, [1])


def test_properties_describe_the_model(models: Models) -> None:
    runner = make_runner(models("qwen3"), num_blocks=4)
    assert (runner.num_layers, runner.vocab_size, runner.max_model_len) == (2, VOCAB, MAX_LEN)
    assert (runner.dtype, runner.device.type) == (torch.float32, "cpu")
    assert runner.cache.bytes_per_block == 16 * 2 * 2 * 16 * 4


def test_bfloat16_gives_float32_logits() -> None:
    runner = make_runner(random_model(CONFIGS["llama"](), dtype=torch.bfloat16), num_blocks=8)
    logits = feed(runner, runner.new_table(), tokens_of(9))
    assert (logits.dtype, runner.dtype) == (torch.float32, torch.bfloat16)
    assert logits.isfinite().all()


class TestPlantedBugs:
    """The comparison above notices what it is there for."""

    @pytest.mark.planted
    def test_catches_lost_causality(
        self, models: Models, reference: Reference, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = make_runner(models("llama"), num_blocks=8)
        monkeypatch.setattr(AttentionGroup, "plan", lambda *_: (0, None))
        tokens = tokens_of(9)
        with pytest.raises(AssertionError):
            assert_close(feed(runner, runner.new_table(), tokens), reference("llama", tokens))

    @pytest.mark.planted
    def test_catches_packed_rows_without_masks(self, models: Models, reference: Reference) -> None:
        """Packed rows of two sequences under plain SDPA see one another."""
        twin = copy.deepcopy(models("llama"))
        twin.set_attn_implementation("sdpa")
        tokens = tokens_of(8)
        with torch.inference_mode():
            logits = twin(
                torch.tensor([tokens + tokens]),
                attention_mask=torch.zeros(1, 1, 16, 16),
                position_ids=torch.tensor([[*range(8), *range(8)]]),
                use_cache=False,
            ).logits[0]
        with pytest.raises(AssertionError):
            assert_close(logits[8:], reference("llama", tokens))

    @pytest.mark.planted
    def test_catches_stale_entries_left_visible(self, models: Models, reference: Reference) -> None:
        """A rollback that forgets to truncate: the rejected tokens stay in the cache."""
        runner = make_runner(models("llama"), num_blocks=8)
        table = runner.new_table()
        prefix, wrong, right = tokens_of(20), tokens_of(4, seed=8), tokens_of(4, seed=9)
        feed(runner, table, prefix + wrong, want=0)
        with pytest.raises(AssertionError):
            assert_close(feed(runner, table, right), reference("llama", prefix + right)[20:])

    @pytest.mark.planted
    def test_catches_a_forgotten_window(self, models: Models, reference: Reference) -> None:
        runner = make_runner(models("mistral"), num_blocks=8)
        runner.cache.windows[:] = [None, None]
        tokens = tokens_of(20)
        with pytest.raises(AssertionError):
            assert_close(feed(runner, runner.new_table(), tokens), reference("mistral", tokens))

    @pytest.mark.planted
    def test_the_self_check_catches_lost_causality(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(AttentionGroup, "plan", lambda *_: (0, None))
        with pytest.raises(InvalidArgumentError, match="other logits"):
            make_runner(models("llama"), num_blocks=8)


class TestInspection:
    """What the engine cannot serve exactly it refuses, naming the model."""

    def test_windows_are_found_layer_by_layer(self, models: Models) -> None:
        windows = [layer.window for layer in attention.inspect_attention(models("gemma2"))]
        assert windows == [6, None]
        assert [x.window for x in attention.inspect_attention(models("llama"))] == [None, None]
        assert attention.inspect_attention(models("qwen3"))[0] == LayerLayout(1, 16, 16, None, per_kv=4)

    @pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "bloom", "mamba"])
    def test_unsupported_attention_is_refused(self, name: str) -> None:
        from transformers import BloomConfig, GptOssConfig, Llama4TextConfig, MambaConfig

        small = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
        config: PreTrainedConfig = {
            "gpt_oss": lambda: GptOssConfig(**small, num_local_experts=2, num_experts_per_tok=1),
            "llama4_text": lambda: Llama4TextConfig(
                **small, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=48
            ),
            "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
            "mamba": lambda: MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
        }[name]()
        with pytest.raises(InvalidArgumentError) as caught:
            make_runner(random_model(config), num_blocks=4)
        assert caught.value.field == "model"

    def test_a_model_that_ignores_positions_is_refused(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows of a second chunk would silently be placed at the start of the sequence."""
        twin = copy.deepcopy(models("llama"))
        rotary = type(twin.model.rotary_emb).forward

        def from_zero(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return rotary(self, x, position_ids - position_ids[:, :1])

        monkeypatch.setattr(type(twin.model.rotary_emb), "forward", from_zero)
        with pytest.raises(InvalidArgumentError, match="other logits"):
            make_runner(twin, num_blocks=4)

    def test_an_attention_call_without_a_batch_fails(self, models: Models) -> None:
        with pytest.raises(InternalError), torch.inference_mode():
            models("llama")(torch.tensor([[1, 2]]), use_cache=False)

    def test_training_mode_and_other_attention_are_refused(self, models: Models) -> None:
        twin = copy.deepcopy(models("llama"))
        with pytest.raises(InvalidArgumentError, match="evaluation"):
            ModulesForward(twin.train())
        twin.eval().set_attn_implementation("sdpa")
        with pytest.raises(InvalidArgumentError, match="attention implementation"):
            ModulesForward(twin)
        assert prepare(twin).config._attn_implementation == attention.IMPLEMENTATION
