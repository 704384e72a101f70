"""Compares a model's logits on the paged cache with transformers' before it serves.

A few tokens are fed in the served shapes: a prompt in chunks, the last row of a chunk alone, and a sequence
beside another one. This reveals models that violate the engine's assumptions: explicit positions, rows that
see only their own sequence, causality, windows.

In 16 bits, rounding sometimes sends a row to another expert, and the row's cache entries then change all
later rows. This affects few sets of tokens, while the faults above affect all sets. Such a model is refused
if it fails with each of three sets, of which the later ones are judged more strictly.
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
"""Number of compared tokens. A GPU chooses its kernels by shape, so on a GPU they include a full prompt
chunk, whose keys (65) are one more than a whole number of a kernel's tiles. On a CPU that many would take
long."""
_SHORT: Final = 15
"""Number of tokens after that chunk, fed in two parts."""
_LAST: Final = 3
"""Size of the second part, and of each sequence's part if a pass has two sequences."""
_SETS: Final = 3
"""Sets of tokens for a 16-bit model with experts; each is fed if the previous one failed."""

_TOLERANCE: Final = {2: 0.2, 4: 1e-3, 8: 1e-3}
"""Relative error of many rows together, by bytes per element. Rounding to 16 bits sometimes sends a row to
another expert with very different logits, which is not a fault."""
_OF_NEAREST: Final = {2: (0.03, 0.15), 4: (1e-3, 1e-3), 8: (1e-3, 1e-3)}
"""Bounds of the tolerance for the nearest row of a pass. A fault in positions or visibility affects all rows
after a prompt's first chunk; its error exceeds rounding, but is often below that of another expert."""
_OF_NOISE: Final = 3.0
"""Within these bounds, the tolerance is this multiple of the error of the first chunk's middle row, since
more layers round more."""
_OF_MIDDLE: Final = 2 / 3
"""Share of that tolerance for a pass's middle row in a later set, so that most rows must be near: with wrong
positions, single rows are near by chance in some set."""


def tokens_to_compare(model: Any, of_set: int = 0) -> list[int]:
    """Distinct tokens for the device's comparison, also distinct between sets if the vocabulary suffices."""
    count = min(_COMPARED.get(model.device.type, _COMPARED["cuda"]), max_length_of(model.config))
    # Offset by one more than their number, so that sets differ even if the vocabulary is a multiple of it.
    first = of_set * (count + 1)
    return [1 + i % max(1, output_width(model) - 1) for i in range(first, first + count)]


@torch.inference_mode()
def logits_of_transformers(model: Any) -> list[Tensor]:
    """Logits of each set, fed at once through transformers' eager attention: [tokens, vocabulary].

    There is one set, or all of them for a 16-bit model with experts, because a backend may take the model's
    weights before it is known which sets are needed. The logits keep the model's dtype, which halves their
    size.
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
    """True for a mixture of experts. Configs name the number of experts in several ways."""
    fields = config.get_text_config(decoder=True).to_dict().items()
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in fields)


def small_cache(model: Any, layers: Sequence[LayerLayout], block_size: int = 1) -> PagedCache:
    """A cache for the comparison."""
    num_blocks = sum(-(-count // block_size) for count in (len(tokens_to_compare(model)), _LAST))
    return PagedCache(
        layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
    )


@torch.inference_mode()
def error_on_paged_cache(
    model: Any, cache: PagedCache, backend: Backend, expected: list[Tensor], fed_before: int = 0
) -> str | None:
    """The error in a backend's logits of the same tokens; None if they are right.

    `cache` is a `small_cache`, `expected` are `logits_of_transformers`. Other tokens are fed in the same
    shapes `fed_before` times first: repeated shapes are recorded, and a replay without effect would return
    the logits of those tokens.
    """
    count = len(expected[0])
    runner = ModelRunner(model, cache, backend)
    for _ in range(fed_before):
        _fed(runner, [0] * count)
    wrong = None
    for of_set, right in enumerate(expected):
        passes = _fed(runner, tokens_to_compare(model, of_set))
        wrong = _too_large(*passes, right.float(), model.dtype.itemsize, strictly=of_set > 0)
        # Neither rounding nor another expert gives NaN.
        if wrong is None or not math.isfinite(wrong):
            break
    if wrong is None:
        return None
    return f"gives other logits on the paged cache than in transformers (relative difference {wrong:.1e})"


def _too_large(
    chunks: list[Tensor], others: list[Tensor], right: Tensor, size: int, *, strictly: bool
) -> float | None:
    """The first error in the result of `_fed` beyond the tolerance for elements of `size` bytes; else None.

    `right` are the logits of all its tokens. `strictly` applies the tolerance of later sets.
    """
    whole = torch.cat(chunks)
    # The chunk and the rest are compared separately: among the chunk's many rows a few wrong ones would pass
    # as rounding. The comparison is negated because NaN must count as an error.
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
    """The logits of each chunk; and of the last row alone, the last rows beside a sequence, that sequence.

    The runner's cache is empty again afterwards.
    """
    table, other = runner.new_table(), runner.new_table()
    parts = [part for part in (slice(-_SHORT), slice(-_SHORT, -_LAST), slice(-_LAST, None)) if tokens[part]]
    chunks = [runner.forward([SequenceInput(table, tokens[p], len(tokens[p]))]) for p in parts]
    last, first = tokens[-_LAST:], tokens[:_LAST]
    table.truncate_to(len(tokens) - len(last))
    # As at a prompt's end. Rounding affects this row as it did in its chunk.
    alone = runner.forward([SequenceInput(table, last, 1)])
    table.truncate_to(len(tokens) - len(last))
    # A sequence whose rows follow those of another one, which it must not see.
    both = [SequenceInput(table, last, len(last)), SequenceInput(other, first, len(first))]
    beside, behind = torch.split(runner.forward(both), [len(last), len(first)])
    for each in (table, other):
        each.free()
    return chunks, [alone, beside, behind]


def _error(ours: Tensor, right: Tensor, dim: int | None = None) -> Tensor:
    """Relative difference of rows of logits: of all together, or with `dim` 1 of each row.

    The common offset of a row's logits is removed: it may be most of them, and softmax ignores it.
    """
    ours, right = (rows - rows.mean(dim=1, keepdim=True) for rows in (ours, right))
    error: Tensor = (ours - right).norm(dim=dim) / right.norm(dim=dim).clamp_min(1e-20)
    return error
