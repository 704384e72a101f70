"""One Ray cluster, and the application of the manifest on it, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.continuous import Case
    from harness.pair import Pair
    from harness.ray_cluster import RayApp, RayCluster

PROMPTS = [[40, 41, 42, 43, 44, 45], [100, 101, 102], [7, 8, 9, 10], [200, 33, 80, 90]]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]
LENGTH = 80


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder; without Ray there is nothing to test. Ray's own warnings are not ours."""
    missing = pytest.mark.skip(reason="Ray is not installed: make test-ray installs it")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if find_spec("ray") is None:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def cases(pair_paths: Pair) -> list[Case]:
    """Requests, with the tokens of `paceline serve`."""
    from harness.continuous import Case
    from harness.stacks import running_stack
    from harness.waiting import HANG

    def case(prompt: list[int], sampling: dict[str, float]) -> Case:
        full = {"max_tokens": LENGTH, "ignore_eos": True, **sampling}
        return Case(prompt, full, stack.client.generate(prompt, full, timeout=HANG).token_ids)

    with running_stack(pair_paths) as stack:
        return [case(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]


@pytest.fixture(scope="session")
def cluster(cases: list[Case]) -> Iterator[RayCluster]:
    """Three nodes. After the cases, so that their stack and the cluster do not share the cores."""
    from harness.ray_cluster import ray_cluster

    with ray_cluster(3) as running:
        yield running


@pytest.fixture(scope="session")
def app(cluster: RayCluster) -> Iterator[RayApp]:
    """The manifest's application."""
    from harness.ray_cluster import ray_app

    with ray_app(cluster) as running:
        yield running
