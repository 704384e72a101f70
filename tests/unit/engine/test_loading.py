"""Loading from a directory as a worker does, without the network."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    T5Config,
    ZayaConfig,
)

from paceline.core.errors import InvalidArgumentError
from paceline.core.fingerprint import vocabulary_fingerprint
from paceline.engine.backends.attention import IMPLEMENTATION
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import (
    _refuse_changing_positions,
    load_model,
    make_runner,
    random_model,
    take_over_library_logs,
)

WORDS = ["<unk>", "a", "b", "c", "é", "<eos>", "<pad>"]


def save(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    generation_eos: list[int] | None = None,
    tied: bool = False,
) -> None:
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(["<eos>", "<extra>"])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>").save_pretrained(path)
    config = LlamaConfig(
        vocab_size=16,  # padded: the tokenizer has 8
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        eos_token_id=5,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if generation_eos is not None:
        model.generation_config.eos_token_id = generation_eos
    model.save_pretrained(path)


def test_a_saved_model_loads_and_runs(tmp_path: Path) -> None:
    save(tmp_path, generation_eos=[5, 7])
    loaded = load_model(tmp_path)
    assert loaded.model.config._attn_implementation == IMPLEMENTATION
    assert not loaded.model.training
    assert (loaded.vocab_size, loaded.max_model_len) == (8, 32)
    assert loaded.eos_token_ids == {5, 7}
    runner = make_runner(loaded, num_blocks=64)
    assert runner.cache.num_blocks == 64
    assert runner.forward([SequenceInput(runner.new_table(), [1, 2, 3], 2)]).shape == (2, 8)
    slotted = make_runner(loaded, block_size=32, num_blocks=2)
    assert slotted.cache.block_size == slotted.max_model_len


def test_eos_falls_back_to_the_config(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).eos_token_ids == {5}


@pytest.mark.parametrize(("ids", "kept"), [([5, 8], {5}), ([-1, 12], set())])
def test_ends_unknown_to_the_tokenizer_are_dropped(tmp_path: Path, ids: list[int], kept: set[int]) -> None:
    """The output is 16 wide, the vocabulary 8."""
    save(tmp_path, generation_eos=ids)
    assert load_model(tmp_path).eos_token_ids == kept


def test_the_fingerprint_is_that_of_tokenizer_json(tmp_path: Path) -> None:
    save(tmp_path)
    loaded = load_model(tmp_path)
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab(with_added_tokens=True)
    assert loaded.fingerprint == vocabulary_fingerprint(vocabulary)
    assert vocabulary["<extra>"] == 7


def test_the_fingerprint_depends_on_pairs_not_their_order() -> None:
    one = vocabulary_fingerprint({"a": 1, "b": 2})
    assert one == vocabulary_fingerprint({"b": 2, "a": 1})
    others = [{"a": 2, "b": 1}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a:1;1:b": 2}, {"a": 1, "é": 2}]
    assert len({one, *map(vocabulary_fingerprint, others)}) == 6


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, torch.float32), ("bfloat16", torch.bfloat16), ("float32", torch.float32)],
)
def test_a_16_bit_checkpoint_becomes_float32_on_a_cpu(
    tmp_path: Path, asked: str | None, expected: torch.dtype
) -> None:
    save(tmp_path, dtype=torch.bfloat16)
    loaded = load_model(tmp_path, dtype=asked)
    assert loaded.model.dtype == expected
    assert all(p.dtype == expected for p in loaded.model.parameters())


def test_values_derived_from_the_config_are_float32(tmp_path: Path) -> None:
    """As Gemma's embedding factor, which must not be rounded to bfloat16."""
    save(tmp_path)
    config = Gemma3TextConfig(
        vocab_size=16,
        hidden_size=24,  # whose root is no bfloat16 number
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    ids = [1, 2, 3, 4]
    logits = []
    for dtype in (None, "float32"):
        loaded = load_model(tmp_path, dtype=dtype)
        assert loaded.model.dtype == torch.float32
        runner = make_runner(loaded, num_blocks=8)
        logits.append(runner.forward([SequenceInput(runner.new_table(), ids, len(ids))]))
    assert torch.equal(*logits)


def test_a_checkpoint_without_a_dtype_becomes_float32(tmp_path: Path) -> None:
    save(tmp_path, dtype=torch.bfloat16)
    change(tmp_path, dtype=None, torch_dtype=None)
    assert AutoConfig.from_pretrained(tmp_path).dtype is None
    assert load_model(tmp_path).model.dtype == torch.float32


def test_two_models_do_not_share_a_config() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    first, second = random_model(config), random_model(config)
    assert len({id(config), id(first.config), id(second.config)}) == 3
    assert config._attn_implementation != IMPLEMENTATION
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def change(path: Path, **fields: Any) -> None:
    """Fields of the config that is saved there."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def of_the_base_model(path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(path).model.save_pretrained(path)
    change(path, architectures=["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("lessen", "named"),
    [
        (of_the_base_model, r"lack lm_head\.weight$"),
        (lambda path: change(path, num_hidden_layers=2), r"lack model\.layers\.1\.\S+ and 8 more weights$"),
    ],
)
def test_a_checkpoint_lacking_weights_is_refused(
    lessen: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    """transformers would draw them at random."""
    save(tmp_path)
    lessen(tmp_path)
    with pytest.raises(InvalidArgumentError, match=named) as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"


def test_a_tied_head_is_not_lacking(tmp_path: Path) -> None:
    save(tmp_path, tied=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
    model = load_model(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut_short, "SafetensorError: .*incomplete"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "SafetensorError: .*header"),
        (lambda path: change(path, intermediate_size=32), "RuntimeError: .*"),
        (lambda path: change(path, rms_norm_eps="1e-5"), "'rms_norm_eps' expected float, got str"),
        (lambda path: change(path, num_attention_heads=3), "hidden size .* number of attention heads"),
        (lambda path: change(path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "'factor'"),
        (lambda path: change(path, hidden_act="none_such"), "KeyError: 'none_such'"),
        (lambda path: change(path, model_type="timm_wrapper"), "requires the timm library"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "KeyError: "),
    ],
)
def test_a_broken_checkpoint_is_refused_in_one_line(
    damage: Callable[[Path], Any], why: str, tmp_path: Path
) -> None:
    save(tmp_path)
    damage(tmp_path)
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"
    assert len(caught.value.message.splitlines()) == 1


def test_a_missing_tokenizer_is_reported_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(InvalidArgumentError, match="has no readable tokenizer; copy its tokenizer files"):
        load_model(tmp_path)


def test_a_checkpoint_with_code_names_the_needed_option(tmp_path: Path) -> None:
    save(tmp_path)
    change(tmp_path, model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    (tmp_path / "mine.py").write_text("raise SystemExit")
    with pytest.raises(InvalidArgumentError, match="only runs if trust_remote_code allows it") as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    change(tmp_path, model_type="llama9")
    with pytest.raises(InvalidArgumentError, match="has the model type llama9, which is unknown"):
        load_model(tmp_path)


def test_an_error_of_several_lines_is_reported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("It is one of:\n(1) this\n(2) that")

    save(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(InvalidArgumentError, match=r": It is one of: \(1\) this \(2\) that$"):
        load_model(tmp_path)


def test_a_full_device_is_not_blamed_on_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    save(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(tmp_path)


def test_a_model_with_other_state_is_refused() -> None:
    """One request's text could change its neighbours' logits."""
    config = ZayaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["hybrid"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        router_hidden_size=16,
    )
    with pytest.raises(InvalidArgumentError, match="state other than keys and values") as caught:
        random_model(config, dtype=torch.bfloat16)
    assert caught.value.field == "model"


def test_an_unloadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"
    T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match="encoder-decoder") as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"
    with pytest.raises(InvalidArgumentError) as caught:
        load_model(tmp_path, dtype="int3")
    assert caught.value.field == "dtype"


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ("AutoConfig", OSError("You are trying to access a gated repo.\nMake sure to have access to it.")),
        ("AutoModelForCausalLM", OSError("\nYou are trying to access a gated repo.\n")),
        ("AutoTokenizer", ValueError("You are trying to access a gated repo.")),
    ],
)
def test_a_gated_model_is_reported_with_the_remedy(
    of: str, reason: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise reason

    save(tmp_path)
    monkeypatch.setattr(getattr(transformers, of), "from_pretrained", refuse)
    with pytest.raises(InvalidArgumentError, match="is gated: accept its terms on the hub") as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_a_quantised_checkpoint_is_refused_before_its_weights(
    tmp_path: Path, settings: dict[str, Any], method: str, place: str
) -> None:
    """The folder has no weights."""
    quantised = {"model_type": "llama", "quantization_config": settings}
    whole = {"model_type": "llava", "text_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(whole if place == "text_config" else quantised))
    with pytest.raises(InvalidArgumentError, match=f"quantised by {method}") as caught:
        load_model(tmp_path)
    assert caught.value.field == "model"


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [4.0, 8.0]}


def test_positions_changing_within_the_length_are_refused() -> None:
    config = Phi3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=LONGROPE,
        pad_token_id=0,
    )
    model = random_model(config)
    for longest in (None, 64, 17):
        with pytest.raises(InvalidArgumentError, match="must be at most 16 for phi3") as caught:
            make_runner(model, num_blocks=8, max_model_len=longest)
        assert caught.value.field == "max_model_len"
    runner = make_runner(model, num_blocks=8, max_model_len=16)
    tokens = [1 + i % 15 for i in range(16)]
    table = runner.new_table()
    ours = [runner.forward([SequenceInput(table, fed, len(fed))]) for fed in (tokens[:10], tokens[10:])]
    model.set_attn_implementation("eager")
    whole = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(ours), whole)


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({"rope_parameters": {"full_attention": LONGROPE | {"original_max_position_embeddings": 16}}}, 16),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 8}, 8),
        ({"rope_scaling": {"type": "longrope"}}, 64),
        ({"rope_parameters": {"full_attention": None, "rope_type": "llama3"}, "rope_scaling": None}, 64),
    ],
)
def test_every_config_form_of_changing_positions_is_found(fields: dict[str, Any], served: int) -> None:
    config = SimpleNamespace(model_type="any", max_position_embeddings=64, **fields)
    config.get_text_config = lambda decoder: config
    _refuse_changing_positions(config, served)
    if served < 64:
        with pytest.raises(InvalidArgumentError, match=f"at most {served} for any, got {served + 1}"):
            _refuse_changing_positions(config, served + 1)


def test_hub_log_lines_are_written_once() -> None:
    hub_logging.get_logger()
    hub = logging.getLogger("huggingface_hub")
    hub.addHandler(logging.StreamHandler())
    take_over_library_logs(quiet=False)
    assert not hub.handlers
    assert hub.propagate
