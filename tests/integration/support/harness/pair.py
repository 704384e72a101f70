"""The two models of the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline import assets


@dataclass(frozen=True)
class Pair:
    """Folders of two models that share a tokenizer."""

    target: Path
    draft: Path


def find_pair(variable: str | None, make_folder: Callable[[], Path]) -> Pair:
    """The embedded pair, or the folder a variable names, or a random one in a new folder."""
    embedded = Pair(assets.path("target"), assets.path("draft"))
    if embedded.target.is_dir() and embedded.draft.is_dir():
        return embedded
    if variable:
        named = Pair(Path(variable, "target"), Path(variable, "draft"))
        if not (named.target.is_dir() and named.draft.is_dir()):
            raise FileNotFoundError(f"PACELINE_TEST_PAIR={variable} has no target/ and draft/")
        return named
    return make_random_pair(make_folder())


def make_random_pair(folder: Path) -> Pair:
    """Two random layers over bytes; the draft is the target with some noise, so that it is often right."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=256,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).float()
    pair = Pair(folder / "target", folder / "draft")
    for place, noise in ((pair.target, 0.0), (pair.draft, 0.03)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
        model.save_pretrained(place)
        write_byte_tokenizer(place)
    return pair


def byte_tokenizer() -> Tokenizer:
    """256 tokens of a byte each, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_byte_tokenizer(folder: Path, end_of_text: str = "<|endoftext|>") -> None:
    """256 bytes and one special token."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=end_of_text,
        eos_token=end_of_text,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
