"""Shared by integration, fault and gpu tests: the model pair, its oracle, and one running stack."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

# Several test processes share the cores: threads that wait for one another at every small product would
# spend their time waiting. Read when torch is first imported, here and in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels run in its interpreter where they cannot be compiled. Read when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

sys.path.insert(0, str(Path(__file__).parent / "integration" / "support"))

if TYPE_CHECKING:
    from harness.oracle import Oracle
    from harness.pair import Pair
    from harness.stacks import RunningStack

    from paceline.client import Client


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: garbage collection, here and later, need not look through it."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Else libraries take what is left at the end for leaks."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share processes follow each other, and the longest come first."""
    from harness.scheduling import place_of

    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever shares processes runs in one process, under `--dist loadgroup`."""
    from harness.scheduling import UnitScheduling

    return UnitScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(scope="session", autouse=True)
def _without_limits_of_this_container() -> Iterator[None]:
    """Tests that say how many cores a machine has mean all of their time."""
    from paceline.core.system import control_groups

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(control_groups, "_OWN_GROUPS", Path("/no/such/file"))
        yield


@pytest.fixture(scope="session")
def pair_paths(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The embedded pair; without it $PACELINE_TEST_PAIR; without that a small random pair."""
    from harness.pair import find_pair

    return find_pair(os.environ.get("PACELINE_TEST_PAIR"), lambda: tmp_path_factory.mktemp("random_pair"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path: a socket's has a hundred bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def oracle(pair_paths: Pair) -> Oracle:
    """transformers with the same target checkpoint."""
    from harness.oracle import Oracle

    return Oracle.load(pair_paths.target)


@pytest.fixture(scope="session")
def stack(pair_paths: Pair) -> Iterator[RunningStack]:
    """The stack of every test that kills nothing; its pools must be whole in the end."""
    from harness.stacks import sound_stack

    with sound_stack(pair_paths) as running:
        yield running


@pytest.fixture(scope="session")
def client(stack: RunningStack) -> Client:
    """A client of the shared stack."""
    return stack.client
