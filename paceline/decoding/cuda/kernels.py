"""Which devices use the kernels: those on which a trial gives what torch operations give."""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from paceline.decoding.noise import gumbel_of

log = logging.getLogger(__name__)


class GumbelKernels(Protocol):
    """Functions of `gumbel_kernels.py`, which has their descriptions and can only be imported with Triton."""

    def choose(
        self, logits: Tensor, divisors: Tensor | None, noisy: Tensor, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best token of every row, and its value."""

    def add_noise(
        self, logits: Tensor, divisors: Tensor | None, noisy: Tensor, seeds: Tensor, positions: Tensor
    ) -> Tensor:
        """logits / divisors + noise, float64 [R, V]."""


def gumbel_kernels(device: torch.device) -> GumbelKernels | None:
    """The kernels for a device, or None where torch operations do their work.

    The first call for a device compiles and tries them, which waits for the device: it must not happen while
    a CUDA graph is captured.
    """
    return _tried(device) if device.type == "cuda" else None


@functools.cache
def _tried(device: torch.device) -> GumbelKernels | None:
    try:
        from paceline.decoding.cuda import gumbel_kernels as kernels

        if agree(kernels, device):
            return kernels
        log.error("%s: kernels for coupled noise differ from torch operations and are not used", device)
    except Exception as error:  # no Triton, no C compiler for it, or a device that it does not support
        log.warning("%s: no kernels for coupled noise, so torch operations make it: %s", device, error)
    return None


def agree(kernels: GumbelKernels, device: torch.device) -> bool:
    """Whether a few rows have the sums and choices that torch operations give them."""
    rows, vocabulary = 3, 8208  # more than one part
    numbers = torch.arange(rows, device=device)
    streams = (numbers > 0).long(), numbers - 1, numbers * 1000
    noise = gumbel_of(*streams[1:], vocabulary)
    logits = noise.flip(-1).float()  # any numbers
    logits[:, 5::7] = -torch.inf
    for divisors in (None, numbers.double() * 0.5 + 0.5):
        expected = logits.double() if divisors is None else logits.double() / divisors[:, None]
        expected += noise * streams[0][:, None]
        best = expected.max(-1)
        tokens, values = kernels.choose(logits, divisors, *streams)
        sums = kernels.add_noise(logits, divisors, *streams)
        found, wanted = torch.cat([sums, values[:, None]], 1), torch.cat([expected, best.values[:, None]], 1)
        if not (torch.equal(tokens, best.indices) and torch.allclose(found, wanted, rtol=1e-14, atol=1e-14)):
            return False
    return True
