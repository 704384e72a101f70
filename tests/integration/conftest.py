"""Stacks and models that tests of several files share."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.pair import Pair
    from harness.stacks import RunningStack
    from harness.web import Http


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def http(stack: RunningStack) -> Iterator[Http]:
    """The HTTP face of the shared stack."""
    from harness.web import connect

    yield from connect(stack.stack.http_address)


@pytest.fixture(scope="session")
def text_drafts(pair_paths: Pair) -> Iterator[list[str]]:
    """Two more draft workers, without a model, so that three drafts differ."""
    from harness.stacks import own_worker

    with contextlib.ExitStack() as workers:
        yield [
            workers.enter_context(own_worker("draft", pair_paths.target, drafter=name))
            for name in ("ngram", "stacked:ngram+bigram")
        ]


@pytest.fixture(scope="session")
def deterministic(pair_paths: Pair) -> Iterator[RunningStack]:
    """A stack that computes deterministically; its pools must be whole in the end."""
    from harness.stacks import sound_stack

    with sound_stack(pair_paths, deterministic=True, lookahead_branches=0) as stack:
        yield stack


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random pair over bytes, for tests that need real processes but no meaningful text."""
    from harness.pair import make_random_pair

    return make_random_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def tiny_stack(tiny_pair: Pair) -> Iterator[RunningStack]:
    """A stack of that pair, whose processes may be killed."""
    from harness.stacks import sound_stack

    with sound_stack(tiny_pair) as running:
        yield running
