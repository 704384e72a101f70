"""Shapes of models and batches: those of a card, and small ones for the pretended device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape."""

    name: str
    layers: int
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    vocabulary: int
    longest: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything that differs between a card and the pretended device."""

    target: Shape
    small: Shape
    draft_layers: int
    """Layers of the draft in rounds: the target's first ones."""
    dtype: torch.dtype
    sequences: tuple[int, ...]
    keys: tuple[int, ...]
    """Entries of each sequence before a step."""
    judged: tuple[int, ...]
    """Rounds judged at once."""
    prompt: int
    """Tokens of a prompt in rounds."""
    rounds: int
    """Rounds after those until their shapes are recorded."""
    running: tuple[int, ...]
    """Sequences in rounds."""
    repeats: int
    """Steps whose mean time is told, if recorded; a fourth of it if not."""
    attention_lengths: tuple[int, ...]
    seconds_beside: float
    """How long two processes work side by side."""


def _llama(name: str, layers: int, hidden: int, neurons: int) -> Shape:
    return Shape(name, layers, hidden, neurons, heads=32, kv_heads=8, vocabulary=128_256, longest=131_072)


CARD: Final = Sizes(
    target=_llama("8B", layers=32, hidden=4096, neurons=14_336),
    small=_llama("1B", layers=16, hidden=2048, neurons=8192),
    draft_layers=4,
    dtype=torch.bfloat16,
    sequences=(1, 16, 64),
    keys=(1024, 4096, 8192, 32_768),
    judged=(16, 64),
    prompt=1000,
    rounds=24,
    running=(1, 16),
    repeats=20,
    attention_lengths=(33, 64, 65, 97, 129, 512, 513, 1025),
    seconds_beside=4.0,
)
_TINY: Final = {"neurons": 48, "heads": 4, "kv_heads": 2, "vocabulary": 300, "longest": 256}
PRETENDED: Final = Sizes(
    target=Shape("tiny target", layers=4, hidden=32, **_TINY),
    small=Shape("tiny draft", layers=2, hidden=16, **_TINY),
    draft_layers=2,
    dtype=torch.float32,
    sequences=(1, 2, 3),
    keys=(24, 100),
    judged=(3,),
    prompt=20,
    rounds=3,
    running=(1, 3),
    repeats=2,
    attention_lengths=(33, 65),
    seconds_beside=0.5,
)
K: Final = 4
"""Draft tokens of a round."""
BLOCK_SIZE: Final = 16
