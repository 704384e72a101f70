"""A worker's process as the child of its replica. Serve, and not the replica, starts another if it ends."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO

from paceline.supervisor.announcement import announced_addresses, last_words
from paceline.supervisor.children import log_to_stderr
from paceline.supervisor.processes import start_process

_TAIL_LINES = 20
_LAST_LINES_TIMEOUT = 2.0
"""Seconds to read the last output of an ended process."""


class Child:
    """One process that announces its address and forwards its log to standard error. Thread-safe."""

    def __init__(self, role: str, command: Sequence[str]) -> None:
        """Start the process. Raises OSError."""
        self._role = role
        self._process = start_process(command, None, None)
        self._announced = threading.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.address = ""
        """host:port, once announced."""
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_log)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def wait_for_address(self) -> str:
        """Block until the process is ready. Raises RuntimeError with its last words if it ends before."""
        self._announced.wait()
        if not self.address:
            raise RuntimeError(f"{self._role} worker: {self.last_words()}")
        return self.address

    def last_words(self) -> str:
        """What an ended process said last, or how it ended. Waits for its end."""
        return last_words(self._wait(None), self._tail)

    def stop(self, timeout: float) -> None:
        """Let the process drain and end; kill it after `timeout` seconds."""
        # SIGCONT lets a suspended process handle the SIGTERM.
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._process.send_signal(number)
        try:
            self._wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._wait(None)

    def _wait(self, timeout: float | None) -> int:
        code = self._process.wait(timeout)
        for reader in self._readers:
            reader.join(_LAST_LINES_TIMEOUT)  # a grandchild may hold the pipes open
        assert self._process.stdin
        self._process.stdin.close()
        return code

    def _read_output(self) -> None:
        assert self._process.stdout
        with self._process.stdout as output:
            for line in output:
                announced = announced_addresses(line)
                if announced is None:
                    log_to_stderr(f"[{self._role}] {line.rstrip()}")
                else:
                    self.address = announced.address
                    self._announced.set()
        self._announced.set()

    def _read_log(self) -> None:
        assert self._process.stderr
        stream: IO[str] = self._process.stderr
        with stream:
            for line in stream:
                if line.strip():
                    self._tail.append(line.rstrip())
                    log_to_stderr(f"[{self._role}] {line.rstrip()}")
