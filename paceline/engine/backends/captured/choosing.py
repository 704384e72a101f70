"""The whole draft loop as one step: K passes, each fed with the token chosen by the previous one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.decoding.cuda.kernels import GumbelKernels, gumbel_kernels
from paceline.decoding.noise import gumbel_of
from paceline.engine.backends.captured.recording import Step
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.multi_step import Chain

MARGIN_UNIT = 2.0**-20
MAX_MARGIN = 1e6
"""Bound of margins, which are transferred to the host as integers together with the tokens."""


def choosing_step(forward: Callable[[RaggedBatch], Tensor], inputs: StaticInputs, vocab_size: int) -> Step:
    """A step with the result int64 [sequences, steps, 1], and [sequences, steps, 3 + ranks] with ranks.

    Each step of a sequence gives the token, or -1 if the logits are not numbers, then its margin in
    `MARGIN_UNIT`, at most `MAX_MARGIN`, and the best tokens.
    """
    bucket = inputs.bucket

    def step() -> Tensor:
        ids, positions = inputs.ids, inputs.positions
        warm = inputs.temperatures > 0
        divisors = torch.where(warm, inputs.temperatures, 1.0)[:, None]
        noise = _noise(inputs, vocab_size).unbind(1) if bucket.noisy else ()
        told = []
        for i in range(bucket.steps):
            logits = forward(inputs.batch(ids, positions))[:, :vocab_size].double()
            values = logits / divisors
            if bucket.noisy:
                values = values + torch.where(warm[:, None], noise[i], 0.0)
            ids = values.argmax(-1)
            told.append(_told(logits, ids, _ranked(values, bucket.ranks)))
            positions = positions + 1
        return torch.stack(told, dim=1)

    def step_by_kernels(kernels: GumbelKernels) -> Tensor:
        ids, positions = inputs.ids, inputs.positions
        warm = inputs.temperatures > 0
        divisors = torch.where(warm, inputs.temperatures, 1.0)
        noisy = warm.long() if bucket.noisy else torch.zeros_like(inputs.seeds)
        told = []
        for _ in range(bucket.steps):
            logits = forward(inputs.batch(ids, positions))[:, :vocab_size]
            positions = positions + 1
            streams = divisors, noisy, inputs.seeds, positions
            if bucket.ranks:
                values = kernels.add_noise(logits, *streams)
                ids, ranks = values.argmax(-1), _ranked(values, bucket.ranks)
            else:
                # The next pass looks its ids up, so they are ids even where no logit is a number.
                ids, ranks = kernels.choose(logits, *streams)[0].clamp_min(0), ()
            told.append(_told(logits, ids, ranks))
        return torch.stack(told, dim=1)

    # Before the step is recorded: the first call for a device waits for it.
    kernels = gumbel_kernels(inputs.ids.device)
    return step if kernels is None else partial(step_by_kernels, kernels)


def _told(logits: Tensor, ids: Tensor, ranks: Sequence[Tensor]) -> Tensor:
    """The token, -1 where the logits are none, and what is told of the others."""
    # A sum is finite only if all of its terms are.
    sound = torch.isfinite(logits.sum(-1, dtype=torch.float64))
    return torch.cat([torch.where(sound, ids, -1)[:, None], *ranks], dim=-1)


def _ranked(values: Tensor, ranks: int) -> Sequence[Tensor]:
    """The margin and the best tokens; nothing without ranks."""
    if not ranks:
        return ()
    best = values.topk(ranks + 1, dim=-1)
    margin = (best.values[:, :1] - best.values[:, 1:2]).nan_to_num(0.0).clamp(0.0, MAX_MARGIN)
    return (margin / MARGIN_UNIT).long(), best.indices


def _noise(inputs: StaticInputs, vocab_size: int) -> Tensor:
    """float64 [sequences, steps, vocabulary]: noise of the tokens to choose."""
    bucket, device = inputs.bucket, inputs.ids.device
    decided = inputs.positions[:, None] + torch.arange(1, bucket.steps + 1, device=device)
    seeds = inputs.seeds[:, None].expand_as(decided)
    return gumbel_of(seeds.reshape(-1), decided.reshape(-1), vocab_size).view(
        bucket.sequences, bucket.steps, vocab_size
    )


def chosen_of(told: Sequence[Sequence[Sequence[int]]], num_others: Sequence[int]) -> list[Chain]:
    """Chains from a step's results for each sequence, without padding."""
    chains = []
    for steps, count in zip(told, num_others, strict=False):
        sound = list(itertools.takewhile(lambda entry: entry[0] >= 0, steps))
        others = [tuple(t for t in best if t != token)[:count] for token, _, *best in sound] if count else ()
        margins = [margin * MARGIN_UNIT for _, margin, *_ in sound] if count else ()
        chains.append(Chain([entry[0] for entry in sound], others=others, margins=margins))
    return chains
