"""What no node of a cluster has is said before Serve waits for it."""

from __future__ import annotations

import pytest

from paceline.ray.resources import Reservation, Resources, complaint

NODES: list[Resources] = [
    {"CPU": 8, "memory": 1e9, "node:10.0.0.1": 1},
    {"CPU": 4, "GPU": 2, "memory": 1e9, "node:10.0.0.2": 1},
    {"CPU": 4, "GPU": 2, "memory": 1e9, "node:10.0.0.3": 1},
]


@pytest.mark.parametrize(
    ("need", "missing"),
    [
        (Reservation([{"CPU": 8}]), ""),
        (Reservation([{"CPU": 1, "GPU": 1}]), ""),
        (Reservation([{"GPU": 1}, {"GPU": 1}]), ""),
        (Reservation([{"GPU": 0.5}]), ""),
        (Reservation([{"CPU": 9}]), "no node has 9 CPU"),
        (Reservation([{"CPU": 8, "GPU": 1}]), "no node has 8 CPU, 1 GPU"),
        (Reservation([{"GPU": 2}, {"GPU": 1}]), "no node has 3 GPU"),
        (Reservation([{"GPU": 2}, {"GPU": 2}], together=False), ""),
        (Reservation([{"GPU": 1}, {"TPU": 1}], together=False), "no node has 1 TPU"),
        (Reservation([{"CPU": 1}] * 3, together=False, apart=True), ""),
        (
            Reservation([{"CPU": 1}] * 4, together=False, apart=True),
            "4 bundles need a node each, and there are 3",
        ),
    ],
)
def test_a_replica_without_a_place_is_noticed(need: Reservation, missing: str) -> None:
    text = complaint("TargetWorker", need, NODES)
    assert text.startswith(f"TargetWorker: {missing}") if missing else text == ""


def test_the_nodes_are_told() -> None:
    assert complaint("D", Reservation([{"TPU": 1}]), NODES).endswith("the nodes have 4 CPU, 2 GPU; 8 CPU")
    assert complaint("D", Reservation([{"CPU": 1}]), []).endswith("the nodes have nothing")
