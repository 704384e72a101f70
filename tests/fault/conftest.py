"""The stack whose processes the tests of this folder kill and stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.oracle import Ids, Oracle
    from harness.pair import Pair
    from harness.stacks import RunningStack


@pytest.fixture(scope="session")
def faulty(pair_paths: Pair) -> Iterator[RunningStack]:
    """One supervised stack for the whole folder."""
    from harness.stacks import running_stack
    from harness.waiting import HANG

    with running_stack(
        pair_paths, drain_timeout=5.0, coordinator={"draft_timeout": 2.0, "recovery_timeout": HANG}
    ) as stack:
        yield stack
        stack.check_logs()


@pytest.fixture(autouse=True)
def all_ready(faulty: RunningStack) -> Iterator[None]:
    """Every test begins with all workers and leaves nothing behind."""
    faulty.wait_until_ready()
    yield
    faulty.wait_until_ready()
    faulty.check_pools_whole()


@pytest.fixture(scope="session")
def prompt(oracle: Oracle) -> Ids:
    """Of 48 tokens."""
    from harness.prompts import SOURCE

    return oracle.encode(SOURCE)[:48]
