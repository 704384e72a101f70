"""A stand-in on the CPU for the CUDA kernel under torch's `varlen_attn`.

It computes what the documentation of `varlen_attn` says, and checks what the kernel checks of its arguments.
The kernel itself is no part of any test: it has not been run on a GPU by this project.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

PAGE = 256
"""What the kernel's blocks must be a multiple of."""


@contextlib.contextmanager
def kernel_on_cpu(page: int = PAGE) -> Iterator[list[int]]:
    """Make `varlen_attn` run on a CPU meanwhile; yields the `num_splits` of its calls, 0 for none given.

    `page`: what blocks must be a multiple of.
    """
    splits: list[int] = []

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int | None = None,
    ) -> tuple[Tensor, ...]:
        count, size = block_table.shape[0], key.shape[1]
        numbers = {"cum_seq_q": count + 1, "cum_seq_k": count + 1, "seqused_k": count}
        for (name, length), tensor in zip(numbers.items(), (cum_seq_q, cum_seq_k, seqused_k), strict=True):
            check(tensor.shape == (length,), f"{name} must have {length} numbers")
            check(tensor.dtype == torch.int32, f"{name} must have dtype int32")
            check(tensor.is_contiguous(), f"{name} must be contiguous")
        check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        check(size % page == 0, f"Paged KV cache block size must be divisible by {page}")
        check(key.shape == value.shape and key.shape[-1] == query.shape[-1], "heads must have one size")
        check(all(t.stride(-1) == 1 for t in (query, key, value)), "Input tensor must be contiguous")
        check(not dropout_p and not return_debug_mask, "no dropout")
        rows = cum_seq_q.diff().tolist()
        check(int(cum_seq_q[-1]) == len(query) and max_q == max(rows), "cum_seq_q must have all rows")
        check(seqused_k.cumsum(0).tolist() == cum_seq_k[1:].tolist(), "cum_seq_k must have all keys")
        check(max_k >= int(seqused_k.max()), "max_k must be the most keys")
        splits.append(num_splits or 0)
        joined = max_q == 1 and query.shape[1] > key.shape[2] and max(window_size_left, window_size_right) < 0
        # Otherwise it writes the first sequence only (pytorch#194167).
        check(num_splits == 1 or count == 1 or joined, "packed rows must not split keys")
        out = torch.full_like(query, torch.nan)
        left = max_k if window_size_left < 0 else window_size_left
        right = max_k if window_size_right < 0 else window_size_right
        for i, first in enumerate(cum_seq_q[:-1].tolist()):
            used = int(seqused_k[i])
            blocks = block_table[i, : -(-used // size)].long()
            keys, values = (t[blocks].flatten(0, 1)[:used].float() for t in (key, value))
            part = slice(first, first + rows[i])
            out[part] = attention_of(query[part].float(), keys, values, scale, left, right).to(query.dtype)
        return out, *(torch.empty(0),) * 4

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", kernel, "CPU")
    try:
        yield splits
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def attention_of(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None, left: int, right: int
) -> Tensor:
    """Rows [R, Hq, D] at the end of [K, Hkv, D] keys; row at position p sees [p - left, p + right].

    A row that sees no key has zeros.
    """
    per_kv = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(per_kv, dim=1) for t in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", query, keys) * (query.shape[-1] ** -0.5 if scale is None else scale)
    positions = torch.arange(len(query))[:, None] + len(keys) - len(query)
    places = torch.arange(len(keys))
    hidden = (places > positions + right) | (places < positions - left)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.einsum("hrk,khd->rhd", weights, values)


def check(condition: bool, why: str) -> None:
    """As the kernel fails."""
    if not condition:
        raise RuntimeError(why)
