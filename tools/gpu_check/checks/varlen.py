"""Attention in place, by torch's variable-length kernel on pages of the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tools.gpu_check.report import Failed, Figures, Skipped
from tools.gpu_check.running import Bench, Case, Check

_HEADS, _KV_HEADS, _DIM = 32, 8, 128
_LENGTHS = (1, 17, 256, 1000, 4097, 8192)
"""Entries of each sequence."""
_ROWS = 5


def _cases(bench: Bench) -> Iterator[Case]:
    for page in (16, 256):
        for splits in (1, None):
            name = f"pages of {page}, {'one split' if splits else 'any splits'}"
            yield name, lambda page=page, splits=splits: _measured(bench, page, splits)


def _kernel(bench: Bench) -> Callable[..., Any]:
    if bench.device.pretended:
        raise Skipped("the pretended device has no flash attention")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Skipped(f"torch {torch.__version__} has no torch.nn.attention.varlen") from None
    missing = {"block_table", "seqused_k", "enable_gqa", "num_splits"} - inspect.signature(
        varlen_attn
    ).parameters.keys()
    if missing:
        raise Skipped(f"varlen_attn of torch {torch.__version__} lacks {', '.join(sorted(missing))}")
    return varlen_attn


def _measured(bench: Bench, page: int, splits: int | None) -> Figures:
    kernel, where = _kernel(bench), bench.device.torch
    generator = torch.Generator(where).manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=where, dtype=torch.bfloat16)

    counts = [-(-length // page) for length in _LENGTHS]
    pool = numbers(2, sum(counts), page, _KV_HEADS, _DIM)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2))
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, part in enumerate(torch.split(order, counts)):
        table[row, : len(part)] = part
    rows = [min(_ROWS, length) for length in _LENGTHS]
    query = numbers(sum(rows), _HEADS, _DIM)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device=where)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=where)
    on_device = table.to(where)

    def attend() -> Tensor:
        out = kernel(
            query, pool[0], pool[1], starts, None, _ROWS, max(_LENGTHS),
            window_size=(-1, 0), enable_gqa=True, seqused_k=lengths, block_table=on_device, num_splits=splits,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    found = torch.split(attend().double(), rows)
    error = 0.0
    for i, (length, part, asked) in enumerate(zip(_LENGTHS, found, torch.split(query, rows), strict=True)):
        pages = table[i, : counts[i]].long().to(where)
        keys, values = (side[pages].flatten(0, 1)[:length].double() for side in pool)
        wanted = _reference(asked.double(), keys, values)
        error = max(error, float(((part - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()))
    figures = {"largest_relative_error": error, "ms": 1e3 * bench.device.seconds(attend, 20)}
    if not error < 0.05:
        raise Failed("attention in place is not the reference's", figures)
    return figures


def _reference(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[rows, heads, dim] of the last rows of a sequence, in float64."""
    keys, values = (part.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for part in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", query, keys) * _DIM**-0.5
    rows, length = len(query), len(keys)
    position = torch.arange(length - rows, length, device=query.device)
    hidden = torch.arange(length, device=query.device) > position[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, values)


CHECK = Check("varlen", "torch's attention in place with pages of 16 and 256", _cases)
