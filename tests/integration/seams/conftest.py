"""Stacks of real processes in which toy implementations serve."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.pair import Pair
    from harness.stacks import RunningStack

TOYS = Path(__file__).parent / "toys"


@pytest.fixture
def toys_known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """While the block lasts, processes that are started know the toys that it is given."""
    from harness import stacks

    from paceline.supervisor import stack as supervising

    @contextlib.contextmanager
    def known(*toys: str) -> Iterator[None]:
        program = (sys.executable, str(TOYS), ",".join(toys))
        with monkeypatch.context() as patched:
            patched.setattr(supervising, "PROGRAM", program)
            patched.setattr(stacks, "PROGRAM", program)
            yield

    return known


@pytest.fixture
def with_toys(
    pair_paths: Pair, toys_known: Callable[..., contextlib.AbstractContextManager[None]]
) -> Callable[..., contextlib.AbstractContextManager[RunningStack]]:
    """A stack whose processes all know the toys named first; then options as for `sound_stack`."""
    from harness import stacks

    @contextlib.contextmanager
    def stack_of(*toys: str, **changes: Any) -> Iterator[RunningStack]:
        with toys_known(*toys), stacks.sound_stack(pair_paths, **changes) as running:
            yield running

    return stack_of
