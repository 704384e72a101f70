"""Several passes in a row as one compiled function, each of which feeds what the one before it chose."""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.engine.compiled.kernels import OPTIONS, decoder_pass


@njit(**OPTIONS)
def _chosen(row, vocabulary, temperature, noise):
    """The token a row chooses; -1 where its logits are no distribution."""
    best, at, odd = -np.inf, -1, np.float32(0.0)
    for v in range(vocabulary):
        odd += row[v] - row[v]
    if odd != np.float32(0.0):
        return -1
    for v in range(vocabulary):
        value = np.float64(row[v])
        if temperature > 0.0:
            value = value / temperature + noise[v]
        if value > best:
            best, at = value, v
    return at


@njit(cache=True, **OPTIONS)
def decoder_chain(
    shape, epsilon, scaling, windows, embedding, weights, biases, head_gains, cos, sin, entries,
    ids, positions, keys, key_first, key_count, steps, temperatures, noise, vocabulary, work, logits, tokens,
):  # fmt: skip
    """Feed each row, and then what it chose, steps[r] times. Arguments as for `decoder_pass`, besides:

    Args:
        ids, positions: int64 [R] of each row's first token; they are used up.
        key_first, key_count: int64 [R] at the first step; at each one after it a row sees one key more.
        steps: int64 [R], falling.
        temperatures: float64 [R]; 0 takes the highest logit.
        noise: float64 [R, steps[0], vocabulary], or [1, 1, 1] where nobody has a temperature.
        vocabulary: tokens to choose from; the model's output may be wider.
        logits: float32 [R, vocabulary in whole tiles].
        tokens: int64 [R, steps[0]]: what was chosen; -1 and anything after it where logits were none.
    """
    rows = len(ids)
    slots, wanted = np.empty(rows, dtype=np.int64), np.arange(rows)
    for step in range(steps[0]):
        going = 0
        while going < rows and steps[going] > step:
            slots[going] = keys[key_first[going] + key_count[going] - 1]
            logits[going, :] = np.float32(0.0)
            going += 1
        decoder_pass(
            shape, epsilon, scaling, windows, embedding, weights, biases, head_gains, cos, sin, entries,
            ids[:going], positions[:going], slots[:going], keys, key_first[:going], key_count[:going],
            wanted[:going], work, logits[:going],
        )  # fmt: skip
        for r in range(going):
            row = noise[r, step] if temperatures[r] > 0.0 else noise[0, 0]
            token = _chosen(logits[r], vocabulary, temperatures[r], row)
            tokens[r, step] = token
            ids[r] = max(token, 0)
            positions[r] += 1
            key_count[r] += 1
