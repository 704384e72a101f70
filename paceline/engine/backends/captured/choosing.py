"""The whole draft loop as one step: K passes, each fed with the token chosen by the previous one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import SparseDistribution
from paceline.decoding.cuda.kernels import GumbelKernels, gumbel_kernels
from paceline.decoding.noise import gumbel_of
from paceline.decoding.sampling import wire_form
from paceline.decoding.support import draw_in_tensors
from paceline.engine.backends.captured.buckets import Bucket
from paceline.engine.backends.captured.recording import Step
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.layout import Indices
from paceline.engine.multi_step import Chain

MARGIN_UNIT = 2.0**-20
MAX_MARGIN = 1e6
"""Bound of margins, which are transferred to the host as integers together with the tokens."""


def choosing_step(forward: Callable[[RaggedBatch], Tensor], inputs: StaticInputs, vocab_size: int) -> Step:
    """A step with the result int64 [sequences, steps, columns], which `chosen_of` reads.

    Each step of a sequence gives the token, or -1 if the logits are not numbers. With ranks, its margin in
    `MARGIN_UNIT`, at most `MAX_MARGIN`, and the best tokens follow. With a support, its length and entries
    follow: an id and the bits of a float32 in each.
    """
    bucket, device = inputs.bucket, inputs.ids.device
    # Before the step is recorded: the first call for a device waits for it.
    kernels = gumbel_kernels(device) if bucket.support is None else None

    def step() -> Tensor:
        ids, positions = inputs.ids, inputs.positions
        newest = positions.view(bucket.sequences, bucket.rows)[:, -1]
        warm = inputs.temperatures > 0
        divisors = torch.where(warm, inputs.temperatures, 1.0)
        if bucket.support is not None:
            choose = partial(_drawn, inputs)
        elif kernels is not None:
            noisy = warm.long() if bucket.noisy else torch.zeros_like(inputs.seeds)
            streams = divisors, noisy, inputs.seeds, newest
            choose = partial(_chosen_by_kernels, kernels, streams, bucket.ranks)
        else:
            noise = _noise(inputs, newest, warm, vocab_size) if bucket.noisy else None
            choose = partial(_chosen, divisors, noise, bucket.ranks)
        told = []
        for i in range(bucket.steps):
            logits = forward(inputs.batch(ids, positions))[:, :vocab_size]
            ids, columns = choose(i, logits)
            # A sum is finite only if all of its terms are.
            sound = torch.isfinite(logits.sum(-1, dtype=torch.float64))
            told.append(torch.cat([torch.where(sound, ids, -1)[:, None], *columns], dim=-1))
            positions = newest + (i + 1)
        return torch.stack(told, dim=1)

    return step


_Chosen = tuple[Tensor, Sequence[Tensor]]
"""The tokens, int64 [sequences], and what is told of the others. They are ids of the vocabulary even where no
logit is a number, since the next pass looks them up."""


def _chosen(divisors: Tensor, noise: Tensor | None, ranks: int, i: int, logits: Tensor) -> _Chosen:
    values = logits.double() / divisors[:, None]
    if noise is not None:
        values = values + noise[:, i]
    ids = values.argmax(-1)
    return ids, _ranked(values, ids, ranks)


def _chosen_by_kernels(
    kernels: GumbelKernels, streams: Sequence[Tensor], ranks: int, i: int, logits: Tensor
) -> _Chosen:
    divisors, noisy, seeds, newest = streams
    args = logits, divisors, noisy, seeds, newest + (i + 1)
    if not ranks:
        return kernels.choose(*args)[0].clamp_min(0), ()
    values = kernels.add_noise(*args)
    ids = values.argmax(-1)
    return ids, _ranked(values, ids, ranks)


def _drawn(inputs: StaticInputs, i: int, logits: Tensor) -> _Chosen:
    """As a single step draws (draft_worker/sampling/draw.py)."""
    assert inputs.bucket.support is not None
    scores = logits.float() / inputs.temperatures.float()[:, None]
    ids, tokens, probabilities, lengths = draw_in_tensors(
        scores, inputs.uniforms[:, i], *inputs.bucket.support
    )
    entries = torch.stack([tokens.int(), probabilities.view(torch.int32)], dim=-1).view(torch.int64)[..., 0]
    return ids, [*_ranked(scores.double(), ids, inputs.bucket.ranks), lengths[:, None], entries]


def _ranked(values: Tensor, ids: Tensor, ranks: int) -> Sequence[Tensor]:
    """The margin of these tokens over the best others, and the best tokens; nothing without ranks."""
    if not ranks:
        return ()
    best = values.topk(ranks + 1, dim=-1)
    other = torch.where(best.indices[:, :1] == ids[:, None], best.values[:, 1:2], best.values[:, :1])
    margin = values.gather(1, ids[:, None]) - other
    margin = margin.nan_to_num(0.0).clamp(-MAX_MARGIN, MAX_MARGIN)
    return (margin / MARGIN_UNIT).long(), best.indices


def _noise(inputs: StaticInputs, newest: Tensor, warm: Tensor, vocab_size: int) -> Tensor:
    """float64 [sequences, steps, vocabulary]: noise of the tokens to choose, 0 at temperature 0."""
    bucket, device = inputs.bucket, inputs.ids.device
    decided = newest[:, None] + torch.arange(1, bucket.steps + 1, device=device)
    seeds = inputs.seeds[:, None].expand_as(decided)
    noise = gumbel_of(seeds.reshape(-1), decided.reshape(-1), vocab_size)
    return noise.view(bucket.sequences, bucket.steps, vocab_size) * warm[:, None, None]


def chosen_of(told: Indices, num_others: Sequence[int], bucket: Bucket) -> list[Chain]:
    """Chains from a step's result on the host, without padding."""
    chains = []
    for steps, count in zip(told, num_others, strict=False):
        broken = (steps[:, 0] < 0).nonzero()[0]
        sound = steps[: broken[0]] if len(broken) else steps
        tokens = sound[:, 0].tolist()
        columns, others, margins = sound[:, 1:], list[tuple[int, ...]](), list[float]()
        if bucket.ranks:
            ranked, columns = columns[:, : bucket.ranks + 2], columns[:, bucket.ranks + 2 :]
            if count:
                others = [
                    tuple(t for t in best if t != token)[:count]
                    for token, (_, *best) in zip(tokens, ranked.tolist(), strict=True)
                ]
                margins = (ranked[:, 0] * MARGIN_UNIT).tolist()
        distributions = [] if bucket.support is None else _distributions_of(columns)
        chains.append(Chain(tokens, distributions, others, margins))
    return chains


def _distributions_of(columns: Indices) -> list[SparseDistribution]:
    """Of rows of a length and entries."""
    halves = np.ascontiguousarray(columns[:, 1:]).view(np.uint32)
    probabilities = np.ascontiguousarray(halves[:, 1::2]).view(np.float32)
    return wire_form(halves[:, ::2], probabilities, columns[:, 0].tolist())
