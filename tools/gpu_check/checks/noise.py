"""Coupled noise on the device: the bits of a CPU, by Triton's kernels and by torch operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.decoding.cuda.kernels import GumbelKernels, gumbel_kernels
from paceline.decoding.noise import Purpose, gumbel, uniforms
from tools.gpu_check.device import Device
from tools.gpu_check.report import Failed, Figures, Skipped
from tools.gpu_check.running import Bench, Case, Check

_LARGEST = 2**64 - 1
_STREAMS = ((0, 0), (_LARGEST, 2**63 - 1), (2**63, 1), (0x9E3779B97F4A7C15, 12_345))
"""Seeds and positions."""
_ROWS = 80


def _cases(bench: Bench) -> Iterator[Case]:
    device, vocabulary = bench.device, bench.sizes.target.vocabulary
    seeds, positions = [[stream[i] for stream in _STREAMS] for i in (0, 1)]

    def by_torch() -> Figures:
        found = uniforms(seeds, positions, Purpose.COUPLED, vocabulary, device.torch).cpu()
        return _same_bits(found, uniforms(seeds, positions, Purpose.COUPLED, vocabulary))

    def by_kernels() -> Figures:
        if device.pretended:
            raise Skipped("Triton does not compile for the pretended device")
        _kernels(device)
        from tools.gpu_check.checks.noise_kernels import TILE, stored_uniforms

        last = vocabulary // TILE * TILE - TILE
        wanted = uniforms(seeds, positions, Purpose.COUPLED, vocabulary)
        found, parts = [], []
        for row, (seed, position) in enumerate(_STREAMS):
            for start in (0, TILE, last):
                numbers = _signed([seed, position, start]).to(device.torch)
                found.append(stored_uniforms(*numbers[:, None]).cpu())
                parts.append(wanted[row, start : start + TILE])
        return _same_bits(torch.stack(found), torch.stack(parts))

    def choices() -> Figures:
        kernels = _kernels(device)
        scores = torch.randn(_ROWS, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
        seeds, positions = list(range(_ROWS)), [1000 + 7 * row for row in range(_ROWS)]
        wanted = scores.double() + gumbel(seeds, positions, vocabulary)
        on_device = scores.to(device.torch)
        streams = torch.ones(_ROWS, dtype=torch.int64), _signed(seeds), _signed(positions)
        sent = [each.to(device.torch) for each in streams]
        tokens, _ = kernels.choose(on_device, None, *sent)
        sums = kernels.add_noise(on_device, None, *sent).cpu()
        figures = {
            "rows": _ROWS,
            "different_choices": int((tokens.cpu() != wanted.argmax(-1)).sum()),
            "largest_relative_error": float(((sums - wanted).abs() / wanted.abs()).max()),
            "choose_ms": 1e3 * device.seconds(lambda: kernels.choose(on_device, None, *sent), 10),
        }
        if figures["different_choices"] or figures["largest_relative_error"] > 1e-12:
            raise Failed("kernels choose or add otherwise than a CPU", figures)
        return figures

    yield "uniforms by torch operations", by_torch
    yield "uniforms by kernels", by_kernels
    yield "choices by kernels", choices


def _kernels(device: Device) -> GumbelKernels:
    kernels = gumbel_kernels(device.torch)
    if kernels is None:
        raise Failed("the kernels cannot be used on this device; the log says why")
    return kernels


def _same_bits(found: Tensor, wanted: Tensor) -> Figures:
    different = int((found != wanted).sum())
    figures = {"numbers": wanted.numel(), "different": different}
    if different:
        raise Failed("uniforms have other bits than on a CPU", figures)
    return figures


def _signed(values: list[int]) -> Tensor:
    return torch.tensor([v - 2**64 if v >= 2**63 else v for v in values])


CHECK = Check("noise", "coupled noise against the CPU's bits: torch operations and kernels", _cases)
