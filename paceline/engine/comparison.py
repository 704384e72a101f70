"""A model's logits on the paged cache against those of transformers, before it serves.

A few tokens are fed in the shapes that are served: a prompt in chunks, the last row of a chunk alone, and a
sequence beside another one. What the engine takes for granted and a model does not honour shows in them:
positions that are given, rows that see their own sequence alone, causality, windows.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from paceline.engine.attention import IMPLEMENTATION, LayerLayout
from paceline.engine.batch import SequenceInput
from paceline.engine.cache import PagedCache
from paceline.engine.captured import PATIENCE, Recorder
from paceline.engine.compiled import CompiledForward
from paceline.engine.lean import LeanForward
from paceline.engine.runner import ModelRunner, max_length_of, output_width

_COMPARED: Final = {"cpu": 8, "cuda": 80}
"""Tokens that a runner is compared on. A GPU chooses its kernels by the shape, so there a prompt's chunk of
its own is among them, whose keys (65) are one more than a whole number of a kernel's tiles. A CPU would take
long over so many."""
_SHORT: Final = 15
"""Those behind such a chunk, fed in two parts."""
_LAST: Final = 3
"""The second part; and as many of each sequence where there are two in a pass."""

_TOLERANCE: Final = {2: 0.2, 4: 1e-3, 8: 1e-3}
"""Relative error of many rows together, by bytes per element. Rounding to 16 bits now and then sends a row to
another expert, whose logits are far from the others': that is not wrong."""
_OF_NEAREST: Final = {2: (0.03, 0.15), 4: (1e-3, 1e-3), 8: (1e-3, 1e-3)}
"""What the nearest row of a pass may differ by, at least and at most. A fault in positions, or in what rows
see, is in all rows behind a prompt's first chunk: above rounding, and often below what another expert is."""
_OF_NOISE: Final = 3.0
"""Between the two, so many times what the first chunk's middle row differs by: many layers round more."""


def tokens_to_compare(model: Any) -> list[int]:
    """As many as the device takes, none of them twice where the vocabulary suffices."""
    count = min(_COMPARED.get(model.device.type, _COMPARED["cuda"]), max_length_of(model.config))
    return [1 + i % max(1, output_width(model) - 1) for i in range(count)]


@torch.inference_mode()
def logits_of_transformers(model: Any) -> Tensor:
    """Those tokens fed at once through transformers' eager attention: float32 [tokens, vocabulary]."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens_to_compare(model)], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return logits.float()
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


@torch.inference_mode()
def error_on_paged_cache(
    model: Any,
    layers: tuple[LayerLayout, ...],
    short: LeanForward | CompiledForward | None,
    expected: Tensor,
    recorder: Recorder | None = None,
    room: Tensor | None = None,
) -> str | None:
    """What is wrong with the logits of the same tokens fed through a small cache; None where nothing is.

    `expected` are `logits_of_transformers`. With a `recorder` those of recorded passes are judged.
    """
    tokens = tokens_to_compare(model)
    cache = PagedCache(
        layers, num_blocks=len(tokens) + _LAST, block_size=1, dtype=model.dtype, device=model.device
    )
    runner = ModelRunner(model, cache, model.device, short=short, recorder=recorder, room=room)
    chunks: list[Tensor] = []
    later: list[tuple[Tensor, Tensor]] = []
    # What comes again is recorded, here with other tokens: a replay that did nothing would tell their logits.
    recorded = [] if recorder is None else [[0] * len(tokens)] * (1 + PATIENCE)
    for fed in (*recorded, tokens):
        chunks, later = _fed(runner, fed, expected)
    # Taken off the runner, which it knows: what was recorded goes with this call, and not with a cycle that
    # is found some time later, maybe while another pass is recorded.
    captured, runner.captured = runner.captured, None
    if captured is not None and not captured.usable:
        return "cannot be made"
    wrong = "gives other logits on the paged cache than in transformers (relative difference {:.1e})"
    whole, size = torch.cat(chunks), model.dtype.itemsize
    # The chunk and the rest each by itself: among its many rows a few wrong ones would pass for rounding.
    # And not whether an error is larger, which NaN is not.
    for part in (slice(-_SHORT), slice(-_SHORT, None)):
        error = float(_error(whole[part], expected[part]))
        if not error < _TOLERANCE[size]:
            return wrong.format(error)
    least, most = _OF_NEAREST[size]
    noise = float(_error(chunks[0], expected[: len(chunks[0])], dim=1).median())
    for ours, right in later:
        error = float(_error(ours, right, dim=1).min())
        if not error < min(max(least, _OF_NOISE * noise), most):
            return wrong.format(error)
    return None


def _fed(
    runner: ModelRunner, tokens: list[int], expected: Tensor
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """The logits of each chunk; and those of all passes but the first, with what they should be.

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
    later = [(ours, expected[part]) for ours, part in zip(chunks[1:], parts[1:], strict=True)]
    later += [(alone, chunks[-1][-1:]), (beside, expected[-_LAST:]), (behind, expected[:_LAST])]
    return chunks, later


def _error(ours: Tensor, right: Tensor, dim: int | None = None) -> Tensor:
    """Relative difference of rows of logits: of all of them together, or with `dim` 1 of each.

    What all logits of a row have in common is left out: it may be most of them, and softmax does not see it.
    """
    ours, right = (rows - rows.mean(dim=1, keepdim=True) for rows in (ours, right))
    error: Tensor = (ours - right).norm(dim=dim) / right.norm(dim=dim).clamp_min(1e-20)
    return error
