"""The memory that the largest passes of a worker take, measured on its GPU before it has a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.core import limits
from paceline.engine.backends.captured import MAX_RECORDED, largest_steps
from paceline.engine.backends.interface import Backend, ServedModel
from paceline.engine.cache import PagedCache, bytes_per_block
from paceline.engine.cancel import CancelToken
from paceline.engine.device import free_bytes
from paceline.engine.layout import PassLayout, SequenceRows
from paceline.engine.memory_plan import DEFAULT_SHARE, Card, Needs

BYTES_PER_RECORDING: Final = 2 << 20
"""What a recording takes on the device besides its tensors: an estimate, not measured on a card."""


@dataclass(frozen=True, slots=True)
class PeakLoad:
    """The most that a worker does at once."""

    rows: int = 512
    """Rows of a pass."""
    sequences: int = limits.MAX_RUNNING_SEQUENCES
    chains: bool = False
    """It draws chains."""
    decide: Callable[[Tensor], object] = lambda logits: None
    """What follows a pass with its logits, float32 [rows, vocabulary]."""


def needs_of(
    served: ServedModel, backend: Backend, load: PeakLoad, *, block_size: int, recorded: bool, longest: int
) -> tuple[Needs, Card]:
    """What a worker needs on its CUDA device. `longest`: entries of the longest sequence.

    Runs each of the largest passes once, over a cache of one block whose entries stand for all others.
    """
    device, dtype = served.model.device, served.model.dtype
    torch.cuda.empty_cache()
    weights, total = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[1]
    free = free_bytes(device) or 0
    block = bytes_per_block(served.layers, block_size, dtype)
    # More than the cache will have, since passes and recordings take of this memory too.
    entries = max(1, int(free * DEFAULT_SHARE) // block) * block_size
    longest = min(longest, entries)
    cache = PagedCache(served.layers, num_blocks=1, block_size=block_size, dtype=dtype, device=device)
    layouts = (
        layout_of_one(load.rows, longest, block_size),
        layout_of_many(load.rows, load.sequences, longest, entries, block_size),
        layout_of_tree(load.rows, longest, block_size),
    )
    passes = [partial(backend.forward, layout, cache, CancelToken()) for layout in layouts]
    decide = partial(_decide, load, served.vocab_size, device)
    peak = _peak(device, [*passes, decide])
    graphs = 0
    if recorded and backend.recordable is not None:
        steps = largest_steps(
            backend.recordable,
            cache,
            max_keys=longest,
            vocab_size=served.vocab_size,
            chains=load.chains,
        )
        graphs = _peak(device, steps) + MAX_RECORDED * BYTES_PER_RECORDING
    return Needs(weights, peak, graphs, block), Card(str(device), total, free)


def _decide(load: PeakLoad, vocab_size: int, device: torch.device) -> None:
    load.decide(torch.zeros(load.rows, vocab_size, device=device))


def layout_of_one(rows: int, longest: int, block_size: int) -> PassLayout:
    """The last chunk of the longest prompt, with all of its logits."""
    rows = min(rows, longest)
    return _layout([(rows, longest)], block_size)


def layout_of_many(rows: int, sequences: int, longest: int, entries: int, block_size: int) -> PassLayout:
    """Rounds of many sequences that have all `entries` of a cache together.

    One is the longest; the others are as short as may share its attention call, where they are padded.
    """
    short = 1 + ((1 << (longest - 1).bit_length()) >> 1)
    wanted = max(1, min(sequences, rows, entries // short))
    each = max(1, min(rows // wanted, short))
    return _layout([(each, longest if i == 0 else short) for i in range(wanted)], block_size)


def layout_of_tree(rows: int, longest: int, block_size: int) -> PassLayout:
    """The largest tree at the end of the longest sequence, all of its nodes after one."""
    layout, nodes = layout_of_one(1, longest, block_size), min(limits.MAX_TREE_NODES, rows - 1)
    (trunk,) = layout.sequences
    beside = [replace(trunk, first=1 + node, own=[0]) for node in range(nodes)]
    columns = layout.rows.repeat(1 + nodes, axis=1)
    return PassLayout(columns, [trunk, *beside], np.arange(1 + nodes))


def _layout(parts: Iterable[tuple[int, int]], block_size: int) -> PassLayout:
    """`parts`: of each sequence its rows, and its entries after them, all in block 0."""
    sequences, positions = list[SequenceRows](), list[int]()
    for number, (count, length) in enumerate(parts):
        blocks = [0] * -(-length // block_size)
        start = length - count
        sequences.append(SequenceRows(len(positions), count, start, length, number, block_size, None, blocks))
        positions += range(start, length)
    rows = np.zeros((3, len(positions)), dtype=np.int64)
    rows[1] = positions
    rows[2] = rows[1] % block_size
    return PassLayout(rows, sequences, np.arange(len(positions)))


@torch.inference_mode()
def _peak(device: torch.device, runs: Iterable[Callable[[], object]]) -> int:
    """The most bytes that one of the runs took."""
    most = 0
    for run in runs:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        run()
        most = max(most, torch.cuda.max_memory_reserved(device) - before)
    return most
