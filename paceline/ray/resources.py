"""Whether a cluster has a node for a replica. Serve itself would wait for ever, without a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
"""Amounts by resource, such as `{"CPU": 1, "GPU": 1}`."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one replica of a deployment reserves."""

    bundles: Sequence[Resources]
    together: bool = True
    """All bundles on one node; else each may be on another."""
    apart: bool = False
    """Each bundle on another node."""

    @property
    def gpus(self) -> float:
        """GPUs of all bundles."""
        return sum(bundle.get("GPU", 0) for bundle in self.bundles)


def complaint(deployment: str, need: Reservation, nodes: Sequence[Resources]) -> str:
    """What no node has, in a sentence; empty if a replica would have its place on an empty cluster."""
    wanted = [_sum(need.bundles)] if need.together else need.bundles
    for resources in wanted:
        if not any(_fits(resources, node) for node in nodes):
            return f"{deployment}: no node has {_told(resources)}; the nodes have {_all_told(nodes)}"
    if need.apart and len(need.bundles) > len(nodes):
        return f"{deployment}: {len(need.bundles)} bundles need a node each, and there are {len(nodes)} nodes"
    return ""


def _sum(bundles: Iterable[Resources]) -> Resources:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return total


def _fits(resources: Resources, node: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in resources.items())


def _told(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "nothing"


def _all_told(nodes: Sequence[Resources]) -> str:
    shown = {_told({name: amount for name, amount in node.items() if _countable(name)}) for node in nodes}
    return "; ".join(sorted(shown)) or "nothing"


def _countable(resource: str) -> bool:
    """Every node also has its own name and its memory as resources."""
    return not resource.startswith(("node:", "memory", "object_store_memory"))
