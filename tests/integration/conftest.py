"""A tiny random model pair for tests that need real processes but no meaningful text."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.stacks import RunningStack
    from harness.web import Http


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Pair:
    """Folders of two models that share a tokenizer; the draft is the target with some noise."""

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def http(stack: RunningStack) -> Iterator[Http]:
    """The HTTP face of the shared stack."""
    from harness.web import connect

    yield from connect(stack.stack.http_address)


@pytest.fixture(scope="session")
def deterministic(pair_paths: Any) -> Iterator[RunningStack]:
    """A stack that computes deterministically; its pools must be whole in the end."""
    from harness.stacks import sound_stack

    with sound_stack(pair_paths, deterministic=True, lookahead_branches=0) as stack:
        yield stack


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A byte-level vocabulary, 2 layers of 32 features."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("tiny_pair")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=256,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).float()
    pair = Pair(root / "target", root / "draft")
    for folder, noise in ((pair.target, 0.0), (pair.draft, 0.03)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
        model.save_pretrained(folder)
        write_byte_tokenizer(folder)
    return pair


def write_byte_tokenizer(folder: Path, end_of_text: str = "<|endoftext|>") -> None:
    """256 bytes, no merges, and one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end_of_text,
        eos_token=end_of_text,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
