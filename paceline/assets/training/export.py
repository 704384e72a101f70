"""Write a checkpoint and its tokenizer as transformers loads them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.assets.training.corpus import END_OF_TEXT


def export(model: LlamaForCausalLM, tokenizer_file: Path, folder: Path) -> None:
    """bfloat16 safetensors, config and tokenizer; half the size of float32, and CPUs load it as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
