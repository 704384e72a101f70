"""`paceline drain` tells what is known when the answer is late."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from harness.commands import command

from paceline.v1 import admin_pb2, admin_pb2_grpc


class Slow(admin_pb2_grpc.AdminServiceServicer):
    """A coordinator whose worker takes its time."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def Drain(self, _request: Any, _context: Any) -> admin_pb2.DrainResponse:  # noqa: N802
        self.ended.wait()
        return admin_pb2.DrainResponse()


def test_a_late_answer_does_not_say_that_nothing_happened() -> None:
    slow, server = Slow(), grpc.server(ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(slow, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        done = command("drain", "target", "--address", address, "--timeout", "0.1")
    finally:
        slow.ended.set()
        server.stop(None).wait()
    assert done.returncode == 1
    assert done.stderr == "error: no answer within 0.1 seconds; target may be stopping nevertheless\n"
