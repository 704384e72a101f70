"""A decoder's pass over a few rows as one compiled function: CPU, float32, one thread, no interpreter lock.

Weights lie in tiles of 16 outputs, so that one read of a weight serves all rows. **Every row is computed by
the same operations in the same order whatever other rows are in the pass**: a product sums over its inputs
one by one, an attention row over its own keys. So a token's logits are bitwise the same in prefill, in plain
decoding and in the verification of any proposal, alone or among other sequences.

The compiled function is cached on disk beside this file, or in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numba import njit

from paceline.decoding.cpu.kernel_cache import kept_on_disk
from paceline.engine.backends.compiled.gemm import by_rows, matrix_product
from paceline.engine.backends.compiled.options import OPTIONS
from paceline.engine.backends.compiled.tiles import MOST_ROWS, mix, tile
from paceline.engine.backends.compiled.vectors import LANES, address_of, exp, fetch, largest_of_tiles, turn

_TOGETHER: Final = 8
"""Number of rows of a sequence whose attention is computed together."""
_APART: Final = LANES
"""Numbers of padding between two rows. Rows at a distance of a power of two compete for the few cache lines
with equal address bits: 24 rows of 2,048 numbers were multiplied at a third of the speed."""

_tile = by_rows(tile, MOST_ROWS)
_mix = by_rows(mix, MOST_ROWS)

# ---- the parts of a layer --------------------------------------------------------------------------


@njit(**OPTIONS)
def _normed(x, n, epsilon, gains, out):
    """RMS norm of one row."""
    squares = np.float32(0.0)
    for i in range(n):
        squares += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(n) + epsilon)
    for i in range(n):
        out[i] = x[i] * scale * gains[i]


@njit(**OPTIONS)
def _turned(head, dim, cos, sin):
    """Rotary embedding of one head in place: dimension i turns with i + dim / 2."""
    half = dim // 2
    first, second = head[:half], head[half:]
    other_cos, other_sin = cos[half:], sin[half:]
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * cos[i] - b * sin[i]
        second[i] = b * other_cos[i] + a * other_sin[i]


@njit(**OPTIONS)
def _gated(gate_up, n, out):
    """silu(gate) * up of one row [2 n]."""
    up = gate_up[n:]
    for i in range(n):
        g = gate_up[i]
        e = exp(-abs(g))
        # 1 / (1 + e^-g), from e^-|g| alone
        s = (np.float32(1.0) if g >= 0 else e) / (np.float32(1.0) + e)
        out[i] = g * s * up[i]


@njit(**OPTIONS)
def _largest(row, count):
    whole = count // LANES
    most = largest_of_tiles(address_of(row, 0), whole) if whole else row[0]
    for j in range(whole * LANES, count):
        most = row[j] if row[j] > most else most
    return most


@njit(**OPTIONS)
def _softmax(row, low, count, end, scaling):
    """e^(scaling (score - maximum)) for row[low:count], 0 before and after. Returns 1 / their sum."""
    for j in range(low):
        row[j] = np.float32(0.0)
    for j in range(count, end):
        row[j] = np.float32(0.0)
    seen = row[low:count]
    # The scaling is positive, so the maximum stays the maximum.
    most = _largest(seen, count - low)
    total = np.float32(0.0)
    for j in range(count - low):
        power = exp((seen[j] - most) * scaling)
        seen[j] = power
        total += power
    return np.float32(1.0) / total


@njit(**OPTIONS)
def _compared(
    queries, many, entries, width, dim, head, value, keys, first, count, next_first, next_count, near, turned,
    scores,
):  # fmt: skip
    """scores[:many, :count] = queries K, with 16 transposed keys at a time against each query.

    Meanwhile the next data is prefetched: this head's part of another sequence's entries (keys[next_first:],
    `next_count`), or, without one, this sequence's values, which begin at `value` of an entry, and the keys
    of its first head.
    """
    span = (count + LANES - 1) // LANES * LANES
    key_part, value_part = address_of(entries, head * dim), address_of(entries, value)
    for block in range(0, span, LANES):
        slots = address_of(keys, first + block)
        if block + LANES > count:
            # The last key fills missing places; their results are not read.
            for i in range(LANES):
                near[i] = keys[first + min(block + i, count - 1)]
            slots = address_of(near, 0)
        for d in range(0, dim, 8):
            turn(address_of(entries, head * dim + d), slots, width, address_of(turned, d * LANES))
        of_values, of_keys, part = slots, slots, value_part
        if next_count >= LANES:
            of_values = address_of(keys, next_first + min(block, next_count - LANES))
            of_keys, part = of_values, key_part
        elif next_count == 0 and head == 0 and block + 2 * LANES <= count:
            of_keys, part = address_of(keys, first + block + LANES), key_part
        _tile(
            queries, dim, address_of(turned, 0), dim, scores, block, span, many, 1, 0,
            of_values, of_keys, value_part, part, width,
        )  # fmt: skip
    for key in range(span, next_count):
        at = keys[next_first + key] * width
        for d in range(0, dim, LANES):
            fetch(address_of(entries, at + head * dim + d))
            fetch(address_of(entries, at + value + d))


@njit(**OPTIONS)
def _attended(
    qkv, ldq, at, rows, entries, width, kv_heads, group, dim, keys, first, counts, window, scaling,
    next_first, next_count, near, scratch, out, ldo,
):  # fmt: skip
    """Attention of `rows` rows of one sequence, whose first is row `at` of qkv, `counts` and out.

    Row r sees counts[r] entries, whose slots are keys[first:], or the last `window` of them. All rows are
    multiplied with all keys that any of them sees; masked keys add nothing to a row's sums.

    next_first, next_count: the keys of the next sequence; no keys if there is none. near: int64 [16];
    scratch: the per-key and fixed parts of `scratch_of`. Consecutive rows of qkv are `ldq` apart, those of
    out [rows, heads * dim] `ldo`.
    """
    many = rows * group
    begin, end = counts[at], counts[at]
    for r in range(at, at + rows):
        begin, end = min(begin, counts[r]), max(end, counts[r])
    begin = max(begin - window, 0) if window else 0
    first, count = first + begin, end - begin
    span = (count + LANES - 1) // LANES * LANES
    queries = scratch[: many * dim]
    mixed = scratch[many * dim : 2 * many * dim]
    turned = scratch[2 * many * dim : (2 * many + LANES) * dim]
    shares = scratch[(2 * many + LANES) * dim :]
    scores = shares[many:]
    for h in range(kv_heads):
        for r in range(rows):
            start = (at + r) * ldq + h * group * dim
            queries[r * group * dim : (r + 1) * group * dim] = qkv[start : start + group * dim]
        value = (kv_heads + h) * dim
        _compared(
            queries, many, entries, width, dim, h, value, keys, first, count, next_first, next_count, near,
            turned, scores,
        )  # fmt: skip
        for m in range(many):
            sees = counts[at + m // group]
            low = max(sees - window, 0) - begin if window else 0
            shares[m] = _softmax(scores[m * span : (m + 1) * span], low, sees - begin, count, scaling)
        # While a sequence's values are read, the keys of its next head are prefetched.
        further = (h + 1) * dim - value if h + 1 < kv_heads and next_count == 0 else 0
        v, slots = address_of(entries, value), address_of(keys, first)
        _mix(scores, span, v, count, mixed, 0, dim, many, dim // LANES, LANES, slots, width, further)
        for m in range(many):
            to = (at + m // group) * ldo + (h * group + m % group) * dim
            for d in range(dim):
                out[to + d] = mixed[m * dim + d] * shares[m]


# ---- the pass --------------------------------------------------------------------------------------


@kept_on_disk(**OPTIONS)
def decoder_pass(
    shape,
    epsilon,
    scaling,
    windows,
    embedding,
    weights,
    gains,
    biases,
    head_gains,
    cos,
    sin,
    entries,
    ids,
    positions,
    slots,
    keys,
    key_first,
    key_count,
    wanted,
    work,
    logits,
    cancel,
):
    """Feed rows to a decoder, write their keys and values, and give the logits of the wanted rows.

    Args:
        shape: int64 [9]: layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary in whole tiles,
            1 if query, key and value have biases, and 1 if a word is two bfloat16.
        epsilon, scaling: of the norms and of the attention, float32.
        windows: int64 [layers]: number of entries that a row sees, its own included; 0 for all.
        embedding: float32 [vocabulary, hidden].
        weights: uint32, flat, the bits of a float32 each, or of two bfloat16: of each layer qkv, output, gate
            and up, down; then the head (weights.py). One type for both: numba's cache on disk is not safe
            if two processes compile the same function for different types.
        gains: float32 [2 layers + 1, hidden]: of each layer's two norms, and of the last one.
        biases: float32 [layers, qkv], or [1, 1].
        head_gains: float32 [layers, heads + kv_heads, head_dim], or [1, 1, 1] for a model without.
        cos, sin: float32 [positions, head_dim].
        entries: float32 [layers, slots * width]: the cache.
        ids, positions, slots: int64 [R] of each row.
        keys: int64, flat: slots of entries in order of position.
        key_first, key_count: int64 [R]: the range of `keys` that each row sees, its own slot last.
        wanted: int64 [W]: rows whose logits are wanted.
        work: float32, flat: scratch of the size `scratch_of`, aligned to a cache line.
        logits: float32 [W, vocabulary in whole tiles], zeroed.
        cancel: int8 [1]: if another thread sets it before half of the layers have begun, the pass is
            cancelled.

    Returns:
        False if the pass was cancelled: `logits` and the rows' keys and values are then undefined. Else True.
    """
    layers, hidden, heads, kv_heads, dim, inner, vocabulary, biased, halves = shape
    rows, group = len(ids), heads // kv_heads
    qkv_width, rotated, width = (heads + 2 * kv_heads) * dim, heads + kv_heads, 2 * kv_heads * dim
    mixed = heads * dim
    ldx, ldq, lda = hidden + _APART, qkv_width + _APART, mixed + _APART
    ldu, ldg = 2 * inner + _APART, inner + _APART
    x = work[: rows * ldx]
    at = rows * ldx
    normed = work[at : at + rows * ldx]
    at += rows * ldx
    qkv = work[at : at + rows * ldq]
    at += rows * ldq
    attended = work[at : at + rows * lda]
    at += rows * lda
    gate_up = work[at : at + rows * ldu]
    at += rows * ldu
    gated = work[at : at + rows * ldg]
    scratch = work[at + rows * ldg :]
    near = np.empty(LANES, dtype=np.int64)

    for r in range(rows):
        x[r * ldx : r * ldx + hidden] = embedding[ids[r]]
    offset = 0
    for layer in range(layers):
        if 2 * layer < layers and cancel[0] != 0:
            return False
        cache = entries[layer]
        for r in range(rows):
            row = x[r * ldx : r * ldx + hidden]
            _normed(row, hidden, epsilon, gains[2 * layer], normed[r * ldx : r * ldx + hidden])
            row = qkv[r * ldq : r * ldq + qkv_width]
            if biased:
                row[:] = biases[layer]
            else:
                row[:] = np.float32(0.0)
        offset = matrix_product(normed, ldx, weights, halves, offset, hidden, qkv_width, qkv, ldq, rows)
        for r in range(rows):
            row = qkv[r * ldq : r * ldq + qkv_width]
            for h in range(rotated):
                head = row[h * dim : (h + 1) * dim]
                if head_gains.size > 1:
                    _normed(head, dim, epsilon, head_gains[layer, h], head)
                _turned(head, dim, cos[positions[r]], sin[positions[r]])
            cache[slots[r] * width : (slots[r] + 1) * width] = row[mixed:]
        r = 0
        while r < rows:
            together = 1
            while r + together < rows and together < _TOGETHER and key_first[r + together] == key_first[r]:
                together += 1
            after = min(r + together, rows - 1)
            # Further rows of this sequence find all data in the cache.
            next_count = key_count[after] if key_first[after] != key_first[r] else 0
            skipped = max(next_count - windows[layer], 0) if windows[layer] else 0
            _attended(
                qkv, ldq, r, together, cache, width, kv_heads, group, dim, keys, key_first[r], key_count,
                windows[layer], scaling, key_first[after] + skipped, next_count - skipped, near, scratch,
                attended, lda,
            )  # fmt: skip
            r += together
        offset = matrix_product(attended, lda, weights, halves, offset, mixed, hidden, x, ldx, rows)
        for r in range(rows):
            row = x[r * ldx : r * ldx + hidden]
            _normed(row, hidden, epsilon, gains[2 * layer + 1], normed[r * ldx : r * ldx + hidden])
        gate_up[:] = np.float32(0.0)
        offset = matrix_product(normed, ldx, weights, halves, offset, hidden, 2 * inner, gate_up, ldu, rows)
        for r in range(rows):
            _gated(gate_up[r * ldu : r * ldu + 2 * inner], inner, gated[r * ldg : r * ldg + inner])
        offset = matrix_product(gated, ldg, weights, halves, offset, inner, hidden, x, ldx, rows)
    for w in range(len(wanted)):
        row = x[wanted[w] * ldx : wanted[w] * ldx + hidden]
        _normed(row, hidden, epsilon, gains[2 * layers], normed[w * ldx : w * ldx + hidden])
    out = logits.reshape(-1)
    matrix_product(normed, ldx, weights, halves, offset, hidden, vocabulary, out, vocabulary, len(wanted))
    return True


def scratch_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Floats of scratch that a pass needs for each row, for each key of the longest sequence, and once."""
    _, hidden, heads, kv_heads, dim, inner, *_ = shape
    rows = 2 * hidden + (heads + 2 * kv_heads) * dim + heads * dim + 3 * inner + 6 * _APART
    many = _TOGETHER * heads // kv_heads
    return rows, many, (2 * many + LANES) * dim + many * (1 + LANES)
