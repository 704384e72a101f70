"""Writing a checkpoint and its tokenizer in transformers' format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.assets.training.corpus import END_OF_TEXT


def export(model: LlamaForCausalLM, tokenizer_file: Path, folder: Path) -> None:
    """Write bfloat16 safetensors (half the size of float32), config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
