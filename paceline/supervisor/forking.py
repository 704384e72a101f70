"""What a fork server does with its time: it has loaded what workers load, and is forked for each of them.

Requests and replies are JSON in the packets of one Unix socket, replies in the order of the requests:

    first                                                      →  {"pid": its own}
    {"arguments": […]} with standard input, output and error   →  {"pid": N} with a pidfd, or {"error": …}
    none: a child has ended                                    →  {"pid": N, "code": C}

A lock that another thread held would never be free again in a child, so only a process with a single thread
is forked. Nor may it have a CUDA context, which is of no use to a child: who asks sees to that.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKET = 1 << 17
"""Bytes of a request at most: of a command line."""
STREAMS = 3
"""Standard input, output and error."""
_THREADS = Path("/proc/self/task")
_NAME = Path("/proc/self/comm")
"""What `top` and `pgrep` call a process; its command line stays that of the fork server."""


def await_arguments(control: socket.socket) -> list[str] | None:
    """Be forked as often as asked for. Returns in every child, with what it shall do.

    And None here, once nobody holds the other end of `control`.
    """
    # A collector that looked at what is there now would write to it, and so copy it into every child.
    gc.collect()
    gc.freeze()
    return _ForkServer(control).serve()


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}
        """Process ids by the pidfds that tell of their end."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._tell({"pid": os.getpid()})
            while True:
                for key, _ in self._selector.select():
                    if key.fd in self._children:
                        self._bury(key.fd)
                        continue
                    packet, streams, _, _ = socket.recv_fds(self._control, PACKET, STREAMS)
                    if not packet:
                        return None
                    if self._fork(streams):
                        arguments: list[str] = json.loads(packet)["arguments"]
                        _NAME.write_text(arguments[0])
                        return arguments
        return None

    def _fork(self, streams: Sequence[int]) -> bool:
        """True in the child."""
        pid = self._new_process()
        if pid == 0:
            self._become_a_child(streams)
            return True
        for stream in streams:
            os.close(stream)
        if pid is not None:
            ending = os.pidfd_open(pid)
            self._children[ending] = pid
            self._selector.register(ending, selectors.EVENT_READ)
            self._tell({"pid": pid}, ending)
        return False

    def _new_process(self) -> int | None:
        """0 in it, its id here; None, and told, where that cannot be."""
        threads = len(list(_THREADS.iterdir()))
        if threads > 1:
            self._tell({"error": f"the fork server has {threads} threads"})
            return None
        try:
            return os.fork()
        except OSError as error:
            self._tell({"error": error.strerror})
            return None

    def _bury(self, ending: int) -> None:
        pid = self._children.pop(ending)
        self._selector.unregister(ending)
        os.close(ending)
        _, status = os.waitpid(pid, 0)
        self._tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _become_a_child(self, streams: Sequence[int]) -> None:
        """Nothing of the fork server's is left; a process group and standard streams of its own."""
        self._selector.close()
        self._control.close()
        for ending in self._children:
            os.close(ending)
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)

    def _tell(self, message: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
