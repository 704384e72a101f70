"""What leaves a link when. Connecting and losing workers is tested with processes."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.dialects import TARGET
from coordinator.links import Link, LinkObserver, LinkState
from paceline.core.messages import CloseSequence
from paceline.rpc import frames
from paceline.rpc.local import LocalStream
from paceline.v1 import target_pb2

ONE, TWO = CloseSequence("one", 3), CloseSequence("two", 4)


class Beside(LocalStream):
    """A local stream that keeps its frames."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.commands.append(frames.target_commands(target_pb2.VerifyRequest.FromString(frame)))


@pytest.fixture
async def link() -> Link:
    def nothing(*_: Any) -> None:
        pass

    link = Link("worker:1", TARGET, LinkObserver(nothing, nothing, nothing, nothing))
    link.state = LinkState.READY
    return link


async def test_a_local_stream_takes_what_is_queued_at_once_in_one_frame(link: Link) -> None:
    beside = link._stream = Beside()
    link.send(ONE)
    link.send(TWO)
    link.flush()
    link.flush()
    assert beside.commands == [[ONE, TWO]]
    assert not link._pending.is_set(), "the writer has nothing to do"


async def test_what_grpc_has_to_wait_for_stays_for_the_writer(link: Link) -> None:
    link.send(ONE)
    link.flush()
    assert link._outbox == [ONE]
    assert link._pending.is_set()
