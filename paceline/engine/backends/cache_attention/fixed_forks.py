"""Attention of recorded passes of forks (fork.py): one call, in which each table is gathered once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import fixed_pass, slots_of_blocks
from paceline.engine.backends.cache_attention.interface import PassAttention

MAX_OWN: Final = 64
"""Entries beside a table: the bits of an int64."""


@dataclass(frozen=True, slots=True)
class FixedForks:
    """The attention of all passes of one recorded shape of S forks."""

    within: Tensor
    """[block size]: places in a block."""
    columns: Tensor
    """[keys]: positions in a table."""
    places: Tensor
    """[MAX_OWN]: places beside it."""

    @classmethod
    def of(cls, keys: int, block_size: int, device: torch.device) -> Self:
        """For tables of up to `keys` entries, a whole number of blocks."""
        return cls(*(torch.arange(n, device=device) for n in (block_size, keys, MAX_OWN)))

    def at(
        self, blocks: Tensor, own: Tensor, positions: Tensor, slots: Tensor, shared: Tensor, seen: Tensor
    ) -> PassAttention:
        """The attention of one pass. Nothing in it may depend on the numbers on the host.

        Args:
            blocks: int64 [S, width]: the blocks of each table, from position 0 on.
            own: int64 [2, S, MAX_OWN]: slots and positions of the entries beside it.
            positions: int64 [S, rows].
            slots: int64 [S, rows]: those that the rows write.
            shared: int64 [S, rows]: how many of the table's entries each row sees.
            seen: int64 [S, rows]: which of the entries beside it, as bits.
        """
        table = slots_of_blocks(blocks, self.within)
        # A key that no row sees must be an entry of the pass too: unused slots may hold NaN, and 0 times NaN
        # is NaN.
        table = torch.where(self.columns < shared.amax(1, keepdim=True), table, slots[:, :1])
        unseen = (seen[..., None] >> self.places) & 1 == 0
        columns = self.columns.expand(len(blocks), -1)
        return fixed_pass(
            torch.cat([table, own[0]], dim=1),
            positions,
            hidden=torch.cat([self.columns >= shared[..., None], unseen], dim=-1),
            key_positions=torch.cat([columns, own[1]], dim=1)[:, None],
        )
