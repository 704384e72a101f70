"""A model's logits on the paged cache against those of transformers, before it serves.

A few tokens are fed in the shapes that are served: a prompt in chunks, the last row of a chunk alone, and a
sequence beside another one. What the engine takes for granted and a model does not honour shows in them:
positions that are given, rows that see their own sequence alone, causality, windows.

In 16 bits rounding now and then sends a row to another expert, and what that row leaves in the cache moves
all rows behind it. This happens to few sets of tokens, and a fault of the kinds above to all: such a model is
refused when it fails with each of three, of which the further ones are judged more strictly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from paceline.engine.backends.attention import IMPLEMENTATION
from paceline.engine.backends.interface import Backend
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.layout import SequenceInput
from paceline.engine.runner import ModelRunner, max_length_of, output_width

_COMPARED: Final = {"cpu": 8, "cuda": 80}
"""Tokens that a runner is compared on. A GPU chooses its kernels by the shape, so there a prompt's chunk of
its own is among them, whose keys (65) are one more than a whole number of a kernel's tiles. A CPU would take
long over so many."""
_SHORT: Final = 15
"""Those behind such a chunk, fed in two parts."""
_LAST: Final = 3
"""The second part; and as many of each sequence where there are two in a pass."""
_SETS: Final = 3
"""Sets of tokens for a 16-bit model with experts; the next one is fed where the one before failed."""

_TOLERANCE: Final = {2: 0.2, 4: 1e-3, 8: 1e-3}
"""Relative error of many rows together, by bytes per element. Rounding to 16 bits now and then sends a row to
another expert, whose logits are far from the others': that is not wrong."""
_OF_NEAREST: Final = {2: (0.03, 0.15), 4: (1e-3, 1e-3), 8: (1e-3, 1e-3)}
"""What the nearest row of a pass may differ by, at least and at most. A fault in positions, or in what rows
see, is in all rows behind a prompt's first chunk: above rounding, and often below what another expert is."""
_OF_NOISE: Final = 3.0
"""Between the two, so many times what the first chunk's middle row differs by: many layers round more."""
_OF_MIDDLE: Final = 2 / 3
"""So much of that a pass's middle row may differ by in a further set. There most rows must be near: in one
set or another a single row is near by chance where positions are wrong."""


def tokens_to_compare(model: Any, of_set: int = 0) -> list[int]:
    """As many as the device takes, none of them twice, nor in two sets, where the vocabulary suffices."""
    count = min(_COMPARED.get(model.device.type, _COMPARED["cuda"]), max_length_of(model.config))
    # One further than their number: sets should differ also where that is a multiple of the vocabulary's.
    first = of_set * (count + 1)
    return [1 + i % max(1, output_width(model) - 1) for i in range(first, first + count)]


@torch.inference_mode()
def logits_of_transformers(model: Any) -> list[Tensor]:
    """Each set's tokens fed at once through transformers' eager attention: [tokens, vocabulary].

    One set, or all of a 16-bit model with experts: a backend may leave a model without weights before
    it is known which are needed. In the model's own numbers, which are half as large.
    """
    model.set_attn_implementation("eager")
    try:
        count = _SETS if model.dtype.itemsize == 2 and _has_experts(model.config) else 1
        sets = (tokens_to_compare(model, each) for each in range(count))
        ids = (torch.tensor([tokens], device=model.device) for tokens in sets)
        return [model(input_ids=each, use_cache=False).logits[0] for each in ids]
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def _has_experts(config: Any) -> bool:
    """Configs call their number by several names, and rounding sends rows to others if there are some."""
    fields = config.get_text_config(decoder=True).to_dict().items()
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in fields)


def small_cache(model: Any, layers: Sequence[LayerLayout]) -> PagedCache:
    """One that holds what a runner is compared on."""
    count = len(tokens_to_compare(model))
    return PagedCache(layers, num_blocks=count + _LAST, block_size=1, dtype=model.dtype, device=model.device)


@torch.inference_mode()
def error_on_paged_cache(
    model: Any, cache: PagedCache, backend: Backend, expected: list[Tensor], fed_before: int = 0
) -> str | None:
    """What is wrong with a backend's logits of the same tokens; None where nothing is.

    `cache` is a `small_cache`, `expected` are `logits_of_transformers`. As often as `fed_before` says other
    tokens are fed in the same shapes first: what comes again is recorded, and a replay that did nothing would
    give their logits.
    """
    count = len(expected[0])
    runner = ModelRunner(model, cache, backend)
    for _ in range(fed_before):
        _fed(runner, [0] * count)
    wrong = None
    for of_set, right in enumerate(expected):
        passes = _fed(runner, tokens_to_compare(model, of_set))
        wrong = _too_large(*passes, right.float(), model.dtype.itemsize, strictly=of_set > 0)
        # Neither rounding nor another expert makes NaN.
        if wrong is None or not math.isfinite(wrong):
            break
    if wrong is None:
        return None
    return f"gives other logits on the paged cache than in transformers (relative difference {wrong:.1e})"


def _too_large(
    chunks: list[Tensor], others: list[Tensor], right: Tensor, size: int, *, strictly: bool
) -> float | None:
    """The first error of what `_fed` returns that is larger than numbers of `size` bytes explain; None where
    none is. `right` are the logits of all its tokens. `strictly`: as those of further sets are judged.
    """
    whole = torch.cat(chunks)
    # The chunk and the rest each by itself: among its many rows a few wrong ones would pass for rounding.
    # And not whether an error is larger, which NaN is not.
    for part in (slice(-_SHORT), slice(-_SHORT, None)):
        error = float(_error(whole[part], right[part]))
        if not error < _TOLERANCE[size]:
            return error
    least, most = _OF_NEAREST[size]
    noise = float(_error(chunks[0], right[: len(chunks[0])], dim=1).median())
    alone, beside, behind = others
    later = list(zip(chunks, torch.split(right, [len(chunk) for chunk in chunks]), strict=True))[1:]
    later += [(alone, chunks[-1][-1:]), (beside, right[-_LAST:]), (behind, right[:_LAST])]
    bound = min(max(least, _OF_NOISE * noise), most) * (_OF_MIDDLE if strictly else 1)
    for ours, theirs in later:
        errors = _error(ours, theirs, dim=1)
        error = float(errors.median() if strictly else errors.min())
        if not error < bound:
            return error
    return None


def _fed(runner: ModelRunner, tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of each chunk; and of the last row alone, the last rows beside a sequence, and that one's.

    The runner's cache is empty again afterwards.
    """
    table, other = runner.new_table(), runner.new_table()
    parts = [part for part in (slice(-_SHORT), slice(-_SHORT, -_LAST), slice(-_LAST, None)) if tokens[part]]
    chunks = [runner.forward([SequenceInput(table, tokens[p], len(tokens[p]))]) for p in parts]
    last, first = tokens[-_LAST:], tokens[:_LAST]
    table.truncate_to(len(tokens) - len(last))
    # As a prompt ends. Rounding does to this row what it did to it just now.
    alone = runner.forward([SequenceInput(table, last, 1)])
    table.truncate_to(len(tokens) - len(last))
    # A sequence that begins behind the rows of another one, which are none of its own.
    both = [SequenceInput(table, last, len(last)), SequenceInput(other, first, len(first))]
    beside, behind = torch.split(runner.forward(both), [len(last), len(first)])
    for each in (table, other):
        each.free()
    return chunks, [alone, beside, behind]


def _error(ours: Tensor, right: Tensor, dim: int | None = None) -> Tensor:
    """Relative difference of rows of logits: of all of them together, or with `dim` 1 of each.

    What all logits of a row have in common is left out: it may be most of them, and softmax does not see it.
    """
    ours, right = (rows - rows.mean(dim=1, keepdim=True) for rows in (ours, right))
    error: Tensor = (ours - right).norm(dim=dim) / right.norm(dim=dim).clamp_min(1e-20)
    return error
