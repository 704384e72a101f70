"""A decoder's pass over a few rows as one compiled function: CPU, float32, one thread, no interpreter lock.

Weights lie in tiles of 16 outputs, so that one read of a weight serves all rows. **Every row is computed by
the same operations in the same order whatever other rows are in the pass**: a product sums over its inputs
one by one, an attention row over its own keys. So a token's logits are bitwise the same in prefill, in
plain decoding and in the verification of any proposal, alone or among other sequences.

The compiled function is cached on disk beside this file, or in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import njit

from paceline.engine.compiled.tiles import (
    LANES,
    MOST_ROWS,
    address_of,
    exp,
    four_dots,
    mix_1,
    mix_2,
    mix_3,
    mix_4,
    tile_1,
    tile_2,
    tile_3,
    tile_4,
    tile_5,
    tile_6,
)

# NaN must come out where NaN goes in, so that a broken model is noticed: sums may be reordered (the same
# way for every row), nothing may be assumed about their values.
_MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": _MATH}


# ---- the parts of a layer --------------------------------------------------------------------------


@njit(**_OPTIONS)
def _product(x, ldx, weights, offset, n_in, n_out, out, ldo, rows):
    """out[:rows, :n_out] += x[:rows, :n_in] W, where W [n_in, n_out] begins at `offset` in tiles."""
    for first in range(0, n_out, LANES):
        w = address_of(weights, offset + first * n_in)
        r = 0
        while rows - r >= MOST_ROWS:
            tile_6(address_of(x, r * ldx), ldx, w, n_in, address_of(out, r * ldo + first), ldo)
            r += MOST_ROWS
        left = rows - r
        if left == 0:
            continue
        a, o = address_of(x, r * ldx), address_of(out, r * ldo + first)
        if left == 1:
            tile_1(a, ldx, w, n_in, o, ldo)
        elif left == 2:
            tile_2(a, ldx, w, n_in, o, ldo)
        elif left == 3:
            tile_3(a, ldx, w, n_in, o, ldo)
        elif left == 4:
            tile_4(a, ldx, w, n_in, o, ldo)
        else:
            tile_5(a, ldx, w, n_in, o, ldo)


@njit(**_OPTIONS)
def _normed(x, n, epsilon, out):
    """RMS norm of one row without its gain, which the weights that follow have taken in."""
    squares = np.float32(0.0)
    for i in range(n):
        squares += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(n) + epsilon)
    for i in range(n):
        out[i] = x[i] * scale


@njit(**_OPTIONS)
def _turned(head, dim, cos, sin):
    """Rotary embedding of one head in place: dimension i turns with i + dim / 2."""
    half = dim // 2
    first, second = head[:half], head[half:]
    other_cos, other_sin = cos[half:], sin[half:]
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * cos[i] - b * sin[i]
        second[i] = b * other_cos[i] + a * other_sin[i]


@njit(**_OPTIONS)
def _gated(gate_up, n, out):
    """silu(gate) * up of one row [2 n]."""
    up = gate_up[n:]
    for i in range(n):
        g = gate_up[i]
        e = exp(-abs(g))
        # 1 / (1 + e^-g), from e^-|g| alone
        s = (np.float32(1.0) if g >= 0 else e) / (np.float32(1.0) + e)
        out[i] = g * s * up[i]


@njit(**_OPTIONS)
def _largest(row, count):
    """The largest of the numbers; four comparisons are under way at a time."""
    a = b = c = d = row[0]
    for j in range(0, count - 3, 4):
        four = row[j : j + 4]
        a = four[0] if four[0] > a else a
        b = four[1] if four[1] > b else b
        c = four[2] if four[2] > c else c
        d = four[3] if four[3] > d else d
    for j in range(count - count % 4, count):
        a = row[j] if row[j] > a else a
    a, c = (a if a > b else b), (c if c > d else d)
    return a if a > c else c


@njit(**_OPTIONS)
def _attended(query, entries, width, kv_heads, group, dim, keys, first, count, scaling, scores, out):
    """One row's attention over `count` entries whose slots are keys[first:]; query and out [heads * dim].

    scores: scratch of [group rounded up to fours, count].
    """
    for i in range(kv_heads * group * dim):
        out[i] = np.float32(0.0)
    for h in range(kv_heads):
        for j in range(count):
            k = address_of(entries, keys[first + j] * width + h * dim)
            for g in range(0, group, 4):
                # Beyond the group it reads other floats of the scratch, and writes rows nobody reads.
                four_dots(
                    address_of(query, (h * group + g) * dim),
                    k,
                    dim // LANES,
                    address_of(scores, g * count + j),
                    count,
                )
        for g in range(group):
            row = scores[g * count : (g + 1) * count]
            most = _largest(row, count)
            # The scaling is positive: the largest stays the largest.
            for j in range(count):
                row[j] = exp((row[j] - most) * scaling)
            total = np.float32(0.0)
            for j in range(count):
                total += row[j]
            share = np.float32(1.0) / total
            for j in range(count):
                row[j] *= share
        values = (kv_heads + h) * dim
        for d in range(0, dim, LANES):
            v, slots = address_of(entries, values + d), address_of(keys, first)
            for g in range(0, group, 4):
                p, o = address_of(scores, g * count), address_of(out, (h * group + g) * dim + d)
                left = group - g
                if left >= 4:
                    mix_4(p, count, v, count, o, dim, slots, width)
                elif left == 3:
                    mix_3(p, count, v, count, o, dim, slots, width)
                elif left == 2:
                    mix_2(p, count, v, count, o, dim, slots, width)
                else:
                    mix_1(p, count, v, count, o, dim, slots, width)


# ---- the pass --------------------------------------------------------------------------------------


@njit(cache=True, **_OPTIONS)
def decoder_pass(
    shape,
    epsilon,
    scaling,
    windows,
    embedding,
    weights,
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
):
    """Feed rows to a decoder, write their keys and values, and give the logits of the rows wanted.

    Args:
        shape: int64 [8]: layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary in whole tiles,
            and whether query, key and value have biases.
        epsilon, scaling: of the norms and of the attention, float32.
        windows: int64 [layers]: how many entries back a row sees, its own included; 0 for all.
        embedding: float32 [vocabulary, hidden].
        weights: float32, flat: of each layer qkv, output, gate and up, down; then the head (weights.py).
        biases: float32 [layers, qkv], or [1, 1].
        head_gains: float32 [layers, heads + kv_heads, head_dim], or [1, 1, 1] for a model without.
        cos, sin: float32 [positions, head_dim].
        entries: float32 [layers, slots * width]: the cache.
        ids, positions, slots: int64 [R] of each row.
        keys: int64, flat: slots of entries in order of position.
        key_first, key_count: int64 [R]: what each row sees of `keys`, its own slot last.
        wanted: int64 [W]: rows whose logits are wanted.
        work: float32, flat: scratch as `scratch_of` says.
        logits: float32 [W, vocabulary in whole tiles], zeroed.
    """
    layers, hidden, heads, kv_heads, dim, inner, vocabulary, biased = shape
    rows, group = len(ids), heads // kv_heads
    qkv_width, rotated, width = (heads + 2 * kv_heads) * dim, heads + kv_heads, 2 * kv_heads * dim
    at = 0
    x = work[at : at + rows * hidden]
    at += rows * hidden
    normed = work[at : at + rows * hidden]
    at += rows * hidden
    qkv = work[at : at + rows * qkv_width]
    at += rows * qkv_width
    attended = work[at : at + rows * heads * dim]
    at += rows * heads * dim
    gate_up = work[at : at + rows * 2 * inner]
    at += rows * 2 * inner
    gated = work[at : at + rows * inner]
    scores = work[at + rows * inner :]

    for r in range(rows):
        x[r * hidden : (r + 1) * hidden] = embedding[ids[r]]
    offset = 0
    for layer in range(layers):
        cache = entries[layer]
        for r in range(rows):
            _normed(x[r * hidden : (r + 1) * hidden], hidden, epsilon, normed[r * hidden : (r + 1) * hidden])
            row = qkv[r * qkv_width : (r + 1) * qkv_width]
            if biased:
                row[:] = biases[layer]
            else:
                row[:] = np.float32(0.0)
        _product(normed, hidden, weights, offset, hidden, qkv_width, qkv, qkv_width, rows)
        offset += hidden * qkv_width
        for r in range(rows):
            row = qkv[r * qkv_width : (r + 1) * qkv_width]
            for h in range(rotated):
                head = row[h * dim : (h + 1) * dim]
                if head_gains.size > 1:
                    _normed(head, dim, epsilon, head)
                    for d in range(dim):
                        head[d] *= head_gains[layer, h, d]
                _turned(head, dim, cos[positions[r]], sin[positions[r]])
            cache[slots[r] * width : (slots[r] + 1) * width] = row[heads * dim :]
        for r in range(rows):
            first, count = key_first[r], key_count[r]
            if windows[layer] and count > windows[layer]:
                first, count = first + count - windows[layer], windows[layer]
            query = qkv[r * qkv_width : r * qkv_width + heads * dim]
            out = attended[r * heads * dim : (r + 1) * heads * dim]
            _attended(query, cache, width, kv_heads, group, dim, keys, first, count, scaling, scores, out)
        _product(attended, heads * dim, weights, offset, heads * dim, hidden, x, hidden, rows)
        offset += heads * dim * hidden
        for r in range(rows):
            _normed(x[r * hidden : (r + 1) * hidden], hidden, epsilon, normed[r * hidden : (r + 1) * hidden])
        gate_up[:] = np.float32(0.0)
        _product(normed, hidden, weights, offset, hidden, 2 * inner, gate_up, 2 * inner, rows)
        offset += hidden * 2 * inner
        for r in range(rows):
            _gated(gate_up[r * 2 * inner : (r + 1) * 2 * inner], inner, gated[r * inner : (r + 1) * inner])
        _product(gated, inner, weights, offset, inner, hidden, x, hidden, rows)
        offset += inner * hidden
    for w in range(len(wanted)):
        r = wanted[w]
        _normed(x[r * hidden : (r + 1) * hidden], hidden, epsilon, normed[w * hidden : (w + 1) * hidden])
    _product(normed, hidden, weights, offset, hidden, vocabulary, logits.reshape(-1), vocabulary, len(wanted))


def scratch_of(shape: Sequence[int]) -> tuple[int, int]:
    """Floats of scratch that a pass needs for each row, and for each key that some row sees."""
    _, hidden, heads, kv_heads, dim, inner, *_ = shape
    queries = -(-heads // kv_heads // 4) * 4
    return 2 * hidden + (heads + 2 * kv_heads) * dim + heads * dim + 3 * inner, queries
