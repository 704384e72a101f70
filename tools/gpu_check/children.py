"""Child processes of the checks, each with a device of its own choice to break."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from tools.gpu_check.device import Device
from tools.gpu_check.report import Failed

_ROOT: Final = Path(__file__).parents[2]


class Child:
    """A process that answers in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.strip())
        self._lines.put(None)

    def line(self, seconds: float) -> str:
        """Its next line. Raises Failed if it ends or is silent."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise Failed(f"a child process was silent for {seconds:.0f} seconds") from None
        if line is None:
            raise Failed(f"a child process ended with code {self._process.wait()}")
        return line

    def last_line(self, seconds: float) -> str:
        """Its last line before it ends, which is its result."""
        last = self.line(seconds)
        with contextlib.suppress(Failed):
            while True:
                last = self.line(seconds)
        return last

    def send(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def started(device: Device, *arguments: str) -> Iterator[Child]:
    """A child that works on the same device; it is ended with the block."""
    command: Sequence[str] = (
        sys.executable,
        "-m",
        "tools.gpu_check",
        *(["--pretend"] if device.pretended else []),
        "--child",
        *arguments,
    )
    process = subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
