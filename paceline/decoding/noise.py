"""Random numbers as a pure function of (seed, position, purpose, index), with the same bits on every device.

The generator is Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with
key (seed, purpose) and counter (block, position, draft index, 0). A CPU uses a compiled version (philox.py),
other devices use torch integers. Both give the bits of numpy's generator.

Choice of the position: coupled noise uses the absolute index of the token to decide, so that draft and target
use the same noise. All other noise belongs to a round: the position is the ledger's length at the start of
the round (which grows with every round), and the index within the stream is that of the try: of a chain, the
draft token's. The draft index is that of the drafter among those of one sequence, for its draws, and else 0:
two drafters that shared their uniforms would draw dependent tokens, which biases the output. Noise of
ratio tests and draft draws must not use the token's own position: block verification also reads tests and
draft tokens beyond the accepted ones, and reusing their noise in the next round would bias the result.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.decoding.cpu.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, fill_uniforms
from paceline.decoding.transfer import to_device

_LOW: Final = 0xFFFFFFFF
_SCALE: Final = 2.0**-52
MAX_NOISE: Final = 2**24
"""Most numbers that a device computes at once; each needs about 100 bytes of temporary memory."""


class Purpose(enum.IntEnum):
    """Use of a random number. Numbers of different purposes are independent; never reuse a number."""

    DRAFT_DRAW = 1
    """The draft's draw of a token from q."""
    ACCEPT_TEST = 2
    """The target's test of a draft token."""
    NEXT_TOKEN = 3
    """The target's draw of the correction or bonus token."""
    COUPLED = 4
    """The Gumbel noise that draft and target add at one position of the sequence."""


@dataclass(frozen=True, slots=True)
class CoupledNoise:
    """A reference to the coupled noise of consecutive positions of one request, not yet computed."""

    seed: int
    first: int
    """The absolute index of the token to decide at the first position."""

    def after(self, count: int) -> CoupledNoise:
        """The noise without the first `count` positions."""
        return CoupledNoise(self.seed, self.first + count)


def uniforms(
    seeds: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    count: int,
    device: torch.device | None = None,
    draft_index: int = 0,
) -> Tensor:
    """Uniform numbers strictly between 0 and 1.

    The map is ((raw >> 12) + 0.5) * 2^-52: exact in float64, symmetric about 1/2, between 2^-53 and
    1 - 2^-53. (With 53 random bits, adding 0.5 to the largest would round up to exactly 1.)

    Args:
        seeds: N integers in [0, 2^64).
        positions: N integers in [0, 2^63).
        purpose: use of the numbers.
        count: numbers per stream.
        device: where to compute; None is the CPU.
        draft_index: which of a sequence's drafters draws; 0 for all other purposes.

    Returns:
        float64 [N, count]; row r holds the first `count` values of stream (seeds[r], positions[r],
        draft_index, purpose), the same bits on every device.
    """
    if device is None or device.type == "cpu":
        return torch.from_numpy(_uniforms_cpu(seeds, positions, purpose, count, draft_index))
    return _uniforms_of(*_columns(seeds, positions, device), purpose, count, draft_index)


def _uniforms_of(
    seeds: Tensor, positions: Tensor, purpose: Purpose, count: int, draft_index: int = 0
) -> Tensor:
    raw = _philox_of(seeds, positions, purpose, count, draft_index)
    return ((raw >> 12) & (2**52 - 1)).to(torch.float64).add_(0.5).mul_(_SCALE)


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | None = None
) -> Tensor:
    """Standard Gumbel noise -log(-log(u)), one number per token, with purpose COUPLED.

    The uniforms have the same bits on every device. The logarithms may differ in their last bit, which
    changes an argmax with a probability of about 1e-13.

    Args:
        seeds: N integers in [0, 2^64).
        positions: N absolute indices of the tokens being decided.
        vocab_size: V.
        device: where to compute; None is the CPU.

    Returns:
        float64 [N, V], all finite.
    """
    if device is None or device.type == "cpu":
        values = _uniforms_cpu(seeds, positions, Purpose.COUPLED, vocab_size)
        for _ in range(2):
            np.log(values, out=values)
            np.negative(values, out=values)
        return torch.from_numpy(values)
    return gumbel_of(*_columns(seeds, positions, device), vocab_size)


def gumbel_of(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`gumbel` for seeds (as signed bits) and positions already on the device, both int64 [N].

    Neither waits for the device nor copies to it.
    """
    u = _uniforms_of(seeds, positions, Purpose.COUPLED, vocab_size)
    return u.log_().neg_().log_().neg_()


def _uniforms_cpu(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, count: int, draft_index: int = 0
) -> npt.NDArray[np.float64]:
    values = np.empty((len(seeds), count))
    streams = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    fill_uniforms(*streams, np.uint64(draft_index), np.uint64(purpose), values)
    return values


def philox_torch(
    seeds: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    count: int,
    device: torch.device,
    draft_index: int = 0,
) -> Tensor:
    """The generator's raw 64-bit outputs, computed with torch integers on any device.

    Returns:
        int64 [N, count]: the bits of the unsigned outputs.
    """
    return _philox_of(*_columns(seeds, positions, device), purpose, count, draft_index)


def _columns(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [N] twice, with the bits of unsigned integers, in one copy to the device."""
    columns = [[_signed(v) for v in column] for column in (seeds, positions)]
    both = to_device(torch.tensor(columns, dtype=torch.int64), device)
    return both[0], both[1]


def _philox_of(
    seeds: Tensor, positions: Tensor, purpose: Purpose, count: int, draft_index: int = 0
) -> Tensor:
    blocks, device = -(-count // 4), seeds.device
    shape = (len(seeds), blocks)
    # The counter is 1 at the first block, as in numpy.
    first = torch.arange(1, blocks + 1, dtype=torch.int64, device=device).expand(shape)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counter = (first, positions[:, None], torch.full_like(zero, draft_index), zero)
    words = philox4x64(counter, (seeds[:, None], torch.full_like(zero, int(purpose))))
    return torch.stack([word.expand(shape) for word in words], dim=-1).reshape(len(seeds), -1)[:, :count]


def philox4x64(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x64 on int64 tensors whose bits are the unsigned words; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(KEY_STEPS[0]), k1 + _signed(KEY_STEPS[1])
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low 64 bits of the unsigned product, by 32-bit halves; relies on int64 wraparound."""
    a_high, a_low = a >> 32, a & _LOW
    b_high, b_low = (b >> 32) & _LOW, b & _LOW
    low = b_low * a_low
    middle = b_low * a_high
    # At most 2^64 - 1, so the unsigned sum does not overflow.
    cross = ((low >> 32) & _LOW) + (middle & _LOW) + b_high * a_low
    high = ((middle >> 32) & _LOW) + ((cross >> 32) & _LOW) + b_high * a_high
    return high, (cross << 32) | (low & _LOW)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return value - 2**64 if value >= 2**63 else value
