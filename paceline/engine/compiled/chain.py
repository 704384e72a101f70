"""Several passes in a row as one compiled function, each of which feeds what the one before it chose.

numba's cache looks at this file alone: after a change in tiles.py, kernels.py or decoding/compiled.py,
touch it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.decoding.compiled import STRICT, draw_support
from paceline.engine.compiled.kernels import OPTIONS, decoder_pass


@njit(**STRICT)
def _broken(row, vocabulary):
    """True where a row's logits are no distribution."""
    odd = 0
    for v in range(vocabulary):
        # Neither NaN nor an infinity is 0 here. Sums that may be reordered would cancel.
        odd += row[v] - row[v] != np.float32(0.0)
    return odd > 0


@njit(**OPTIONS)
def _chosen(row, vocabulary, temperature, noise):
    """The token with the highest logit / temperature + noise; without a temperature the highest logit."""
    best, at = -np.inf, 0
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
    ids, positions, keys, key_first, key_count, steps, temperatures, noise, uniforms, masses, bounds,
    vocabulary, work, logits, tokens, support_ids, probabilities, lengths,
):  # fmt: skip
    """Feed each row, and then its own token, steps[r] times. Arguments as for `decoder_pass`, besides:

    Args:
        ids, positions: int64 [R] of each row's first token; they are used up.
        key_first, key_count: int64 [R] at the first step; at each one after it a row sees one key more.
        steps: int64 [R], falling.
        temperatures: float64 [R]; 0 takes the highest logit.
        noise: float64 [R, steps[0], vocabulary], or [1, 1, 1] where nobody chooses by noise.
        uniforms: float64 [R, steps[0]], or [1, 1] where nobody draws.
        masses, bounds: float64 and int64 [R]: what a row that draws keeps; a bound of 0 is a choosing row's.
        vocabulary: tokens to choose from; the model's output may be wider.
        logits: float32 [R, vocabulary in whole tiles].
        tokens: int64 [R, steps[0]]: what was chosen; -1 and anything after it where logits were none.
        support_ids, probabilities: uint32 and float32 [R, steps[0], largest bound]: what was drawn from.
        lengths: int64 [R, steps[0]]: of these supports.
    """
    rows = len(ids)
    slots, wanted = np.empty(rows, dtype=np.int64), np.arange(rows)
    scratch = np.empty(vocabulary, dtype=np.float32)
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
            if _broken(logits[r], vocabulary):
                token = -1
            elif bounds[r] > 0:
                token, lengths[r, step] = draw_support(
                    logits[r, :vocabulary], np.float32(temperatures[r]), masses[r], bounds[r],
                    uniforms[r, step], scratch, support_ids[r, step], probabilities[r, step],
                )  # fmt: skip
            else:
                row = noise[r, step] if temperatures[r] > 0.0 else noise[0, 0]
                token = _chosen(logits[r], vocabulary, temperatures[r], row)
            tokens[r, step] = token
            ids[r] = max(token, 0)
            positions[r] += 1
            key_count[r] += 1
