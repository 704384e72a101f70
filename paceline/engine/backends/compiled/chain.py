"""Several passes in a row as one compiled function; each feeds the token chosen by the previous one."""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.decoding.cpu.distributions import STRICT, draw_support
from paceline.decoding.cpu.kernel_cache import kept_on_disk
from paceline.decoding.gumbel_argmax import best_of
from paceline.engine.backends.compiled.kernels import decoder_pass
from paceline.engine.backends.compiled.options import OPTIONS


@njit(**STRICT)
def _broken(row, vocabulary):
    """True if a row's logits are not a distribution."""
    odd = 0
    for v in range(vocabulary):
        # NaN and infinities do not give 0 here. Sums, which may be reordered, could cancel them.
        odd += row[v] - row[v] != np.float32(0.0)
    return odd > 0


@kept_on_disk(**OPTIONS)
def decoder_chain(
    shape, epsilon, scaling, windows, embedding, weights, gains, biases, head_gains, cos, sin, entries,
    ids, positions, slots, keys, key_first, key_count, wanted, steps, temperatures, noisy, seeds, decided,
    uniforms, masses, bounds, vocabulary, work, logits, tokens, others, margins, support_ids,
    probabilities, lengths, cancel,
):  # fmt: skip
    """Feed rows, then feed each chain its own tokens, until it has steps[c].

    Arguments as for `decoder_pass`, whose rows are those of the first step, and:

    Args:
        keys: room for those of all steps: a chain sees one more key at each step.
        wanted: int64 [C]: the last row of each chain.
        steps: int64 [C], decreasing.
        temperatures: float64 [C], above 0: divisors of the logits.
        noisy, seeds, decided: bool and twice uint64 [C]: whether a chain chooses by coupled noise, the seed,
        and
            the position of its first chosen token.
        uniforms: float64 [C, steps[0]], or [1, 1] if no chain draws.
        masses, bounds: float64 and int64 [C]: limits of a drawing chain's distributions; otherwise the bound
        is 0.
        vocabulary: number of tokens to choose from; the model's output may be wider.
        logits: float32 [C, vocabulary in whole tiles].
        tokens: int64 [C, steps[0]]: the chosen tokens; -1, then undefined values, if logits were not numbers
            or
            the chain was cancelled.
        others: int64 [C, steps[0], O]: the next best tokens, best first; O may be 0.
        margins: float64 [C, steps[0]]: a token's score minus the best other one's, if O > 0.
        support_ids, probabilities: uint32 and float32 [C, steps[0], largest bound]: the drawn distributions.
        lengths: int64 [C, steps[0]]: sizes of these distributions.
        cancel: int8 [1]: if another thread sets it, no step begins except the first, and a step that has not
            reached its halfway point is cancelled.
    """
    chains = len(wanted)
    values, best = np.empty(others.shape[2] + 1), np.empty(others.shape[2] + 1, dtype=np.int64)
    scratch, newest, rows = np.empty(vocabulary, dtype=np.float32), ids[wanted], np.arange(chains)
    at, slot, first, count = positions[wanted], slots[wanted], key_first[wanted], key_count[wanted]
    never = np.zeros(1, dtype=np.int8)
    for step in range(steps[0]):
        if step > 0 and cancel[0] != 0:
            break
        going = 0
        while going < chains and steps[going] > step:
            slot[going] = keys[first[going] + count[going] - 1]
            logits[going, :] = np.float32(0.0)
            going += 1
        if step == 0:
            decoder_pass(
                shape, epsilon, scaling, windows, embedding, weights, gains, biases, head_gains, cos,
                sin, entries, ids, positions, slots, keys, key_first, key_count, wanted, work, logits,
                never,
            )  # fmt: skip
        elif not decoder_pass(
            shape, epsilon, scaling, windows, embedding, weights, gains, biases, head_gains, cos, sin,
            entries, newest[:going], at[:going], slot[:going], keys, first[:going], count[:going],
            rows[:going], work, logits[:going], cancel,
        ):  # fmt: skip
            break
        for c in range(going):
            at[c] += 1
            count[c] += 1
            newest[c] = 0
            if _broken(logits[c], vocabulary):
                tokens[c, step] = -1
                continue
            if bounds[c] == 0 or len(best) > 1:
                best_of(
                    logits[c], vocabulary, temperatures[c], noisy[c], seeds[c], decided[c] + np.uint64(step),
                    values, best,
                )  # fmt: skip
            token = best[0]
            if bounds[c] > 0:
                token, lengths[c, step] = draw_support(
                    logits[c, :vocabulary], np.float32(temperatures[c]), masses[c], bounds[c],
                    uniforms[c, step], scratch, support_ids[c, step], probabilities[c, step],
                )  # fmt: skip
            tokens[c, step], newest[c], told = token, token, 0
            if len(best) > 1:
                margins[c, step] = values[0] - values[1]
                if token != best[0]:
                    margins[c, step] = np.float64(logits[c, token]) / temperatures[c] - values[0]
            for candidate in best:
                if candidate != token and told < others.shape[2]:
                    others[c, step, told] = candidate
                    told += 1
