"""Frames as long as a message at a worker's port: other sequences go on, and memory stays bounded."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.secret import SECRET
from harness.stacks import RunningStack
from harness.tiers import mostly_full
from harness.waiting import HANG
from harness.wire import Line, Seq, next_round

from paceline.core.messages import DraftProposal, DraftRound, RoundVerdict, VerifyRound
from paceline.core.types import Proposal
from paceline.rpc.streams import frames
from tests.fault.bombs.frames import FRAMES
from tests.fault.streams import memory

METHODS = {"target": "/paceline.v1.TargetService/Verify", "draft": "/paceline.v1.DraftService/Draft"}
PROMPT = [5, 6, 7]
MOST = 2**30
"""Bytes. A frame of 32 MiB holds 16 million commands of two bytes, and each is an object when it is read."""
ANSWERS = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


def one_round(line: Line, sequence: Seq) -> None:
    event = line.ask(next_round(sequence))
    assert isinstance(event, RoundVerdict | DraftProposal), event


class Attack(threading.Thread):
    """One call that sends a frame and a round of an unknown sequence, and ends after the first answer."""

    def __init__(self, address: str, role: str, frame: bytes, compression: grpc.Compression) -> None:
        super().__init__(daemon=True)
        self.code: grpc.StatusCode | None = None
        self._address, self._method, self._compression = address, METHODS[role], compression
        if role == "target":
            last = frames.verify_request([VerifyRound("ghost", 1, 1, 1, (), Proposal())])
        else:
            last = frames.draft_request([DraftRound("ghost", 1, 1, 1, (), 2)])
        self._frames = [frame, last.SerializeToString()]
        self._answered = threading.Event()

    def _requests(self) -> Iterator[bytes]:
        yield from self._frames
        self._answered.wait(HANG)

    def run(self) -> None:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self._address, options=options) as channel:
            call: Any = channel.stream_stream(self._method)(
                self._requests(), metadata=SECRET.metadata, timeout=HANG, compression=self._compression
            )
            try:
                for _ in call:
                    self.code = grpc.StatusCode.OK
                    self._answered.set()
            except grpc.RpcError as error:
                self.code = error.code()  # type: ignore[attr-defined]
            finally:
                self._answered.set()


@pytest.mark.parametrize(
    ("name", "role", "compression"),
    [
        *itertools.product(FRAMES, METHODS, [grpc.Compression.NoCompression]),
        *mostly_full(itertools.product(FRAMES, METHODS, [grpc.Compression.Gzip]), count=2),
    ],
)
def test_a_long_frame_is_refused_while_others_go_on(
    faulty: RunningStack, name: str, role: str, compression: grpc.Compression
) -> None:
    pid, address = faulty.stack.pid(role), faulty.stack.address_of(role)
    # From here on the peak is that of this frame.
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = memory(pid, "VmRSS")
    attack = Attack(address, role, FRAMES[name], compression)
    with Line(address, role) as line:
        sequence = line.open(PROMPT)
        one_round(line, sequence)
        attack.start()
        rounds = 0
        while attack.is_alive() or rounds < 3:
            other = line.open(PROMPT)
            one_round(line, other)
            other.end()
            rounds += 1
    attack.join(HANG)
    assert attack.code in ANSWERS
    assert faulty.stack.pid(role) == pid
    assert memory(pid, "VmHWM") - before < MOST
