"""How a worker divides its part of a GPU: weights, passes, recordings, cache. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InvalidArgumentError

DEFAULT_SHARE: Final = 0.85
"""Share of the memory that is free after loading, for all but the weights; the rest is for CUDA's context,
libraries and gaps between allocations."""
_SHARE: Final = "gpu_memory_utilization"
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Needs:
    """What a worker needs besides its cache, in bytes, as measured on its device."""

    weights: int
    """Held after loading: weights, joined ones too, and buffers."""
    passes: int
    """The most that a pass and the decisions on its logits take: activations, logits, samples."""
    graphs: int
    """The most that recordings take; 0 without."""
    block: int
    """One block of the cache."""

    @property
    def fixed(self) -> int:
        """All of them together, without a block."""
        return self.weights + self.passes + self.graphs


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, in bytes, when the weights are loaded."""

    name: str
    total: int
    free: int
    """What this worker can still allocate."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Parts of a GPU's memory in bytes."""

    total: int
    """All of the GPU's memory."""
    weights: int
    cache: int
    graphs: int
    passes: int
    num_blocks: int

    @property
    def planned(self) -> int:
        """What this worker takes at most."""
        return self.weights + self.cache + self.graphs + self.passes

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "cache": self.cache,
            "recordings": self.graphs,
            "passes and logits": self.passes,
            "not planned": self.total - self.planned,
        }
        said = ", ".join(f"{name} {_gib(count)}" for name, count in parts.items())
        return f"{_gib(self.total)} of GPU memory: {said}"


def plan_memory(
    needs: Needs,
    card: Card,
    *,
    share: float | None = None,
    num_blocks: int | None = None,
    most_blocks: int,
) -> MemoryPlan:
    """Size the cache by what the rest leaves.

    Args:
        needs: what else is needed.
        card: the GPU.
        share: part of the GPU's whole memory for this worker; None takes `DEFAULT_SHARE` of what is free.
        num_blocks: a size that is asked for; `share` is then ignored.
        most_blocks: more than this are of no use.

    Raises InvalidArgumentError, naming what would fit: `num_blocks` for a cache that is too large,
    `gpu_memory_utilization` for a share without room for a block or above what is free, `model` where the GPU
    has no room for one.
    """
    available = needs.weights + card.free
    if needs.fixed + needs.block > available:
        raise InvalidArgumentError("model", _too_large(needs, card, available))
    if num_blocks is not None:
        most = (available - needs.fixed) // needs.block
        if num_blocks > most:
            raise InvalidArgumentError(
                "num_blocks",
                f"{num_blocks} blocks take {_gib(num_blocks * needs.block)}, and beside {_parts(needs)} "
                f"{card.name} has {_gib(available - needs.fixed)} free: at most {most} fit",
            )
    else:
        num_blocks = min((_allowed(needs, card, share) - needs.fixed) // needs.block, most_blocks)
    cache = num_blocks * needs.block
    return MemoryPlan(card.total, needs.weights, cache, needs.graphs, needs.passes, num_blocks)


def _allowed(needs: Needs, card: Card, share: float | None) -> int:
    """Bytes for everything, with room for a block at least."""
    available, least = needs.weights + card.free, needs.fixed + needs.block
    enough = math.ceil(100 * least / card.total) / 100
    if share is None:
        allowed = needs.weights + int(card.free * DEFAULT_SHARE)
        if least > allowed:
            raise InvalidArgumentError(
                _SHARE, f"by default leaves no room for a cache beside {_parts(needs)}: give {enough:.2f}"
            )
        return allowed
    allowed = int(card.total * share)
    asked = f"{share:g} of the {_gib(card.total)} of {card.name} are {_gib(allowed)}"
    if allowed > available:
        raise InvalidArgumentError(
            _SHARE,
            f"{asked}; the weights take {_gib(needs.weights)} of it, and only {_gib(card.free)} are free for "
            f"the rest: ask for at most {math.floor(100 * available / card.total) / 100:.2f}, or stop other "
            "processes on this device",
        )
    if least > allowed:
        raise InvalidArgumentError(
            _SHARE,
            f"{asked}, without room for a cache beside {_parts(needs)}: ask for at least {enough:.2f}, or "
            f"{_LESS}",
        )
    return allowed


_LESS: Final = (
    "for less: fewer --max-batch-tokens and a shorter --max-model-len shrink passes, --no-cuda-graphs leaves "
    "out recordings, a 16-bit --dtype halves float32 weights, a smaller model the rest"
)


def _too_large(needs: Needs, card: Card, available: int) -> str:
    return f"{_parts(needs)} leave no room for a cache in the {_gib(available)} of {card.name}: ask {_LESS}"


def _parts(needs: Needs) -> str:
    return (
        f"{_gib(needs.weights)} of weights, {_gib(needs.passes)} of passes and "
        f"{_gib(needs.graphs)} of recordings"
    )


def _gib(count: float) -> str:
    return f"{count / _GIB:,.1f} GiB"
