"""Bookkeeping of the KV cache: blocks, block tables, leases. Standard library only, no tensors."""

from paceline.kv.branches import Branch, Branching
from paceline.kv.lease import Leases
from paceline.kv.pool import BlockPool
from paceline.kv.table import BlockTable, CopyBlock

__all__ = ["BlockPool", "BlockTable", "Branch", "Branching", "CopyBlock", "Leases"]
