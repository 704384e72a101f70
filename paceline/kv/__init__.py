"""Bookkeeping of the KV cache: blocks, tables, prefix index, leases. Standard library only, no tensors."""

from paceline.kv.branches import Branch, Branching
from paceline.kv.lease import Leases
from paceline.kv.pool import BlockPool
from paceline.kv.prefix import CachedPrefix, PrefixIndex
from paceline.kv.table import BlockTable, CopyBlock

__all__ = [
    "BlockPool",
    "BlockTable",
    "Branch",
    "Branching",
    "CachedPrefix",
    "CopyBlock",
    "Leases",
    "PrefixIndex",
]
