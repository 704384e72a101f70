"""Log lines of processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from harness.waiting import HANG


@dataclass
class Log:
    """A sink: every line of every process, in order."""

    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def find(self, text: str) -> list[str]:
        """The lines that hold `text`."""
        with self._changed:
            return [line for line in self.lines if text in line]

    def wait_for(self, start: str, count: int = 1, timeout: float = HANG) -> list[str]:
        """The lines that begin like this, once there are so many."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(start)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, timeout), self.lines
            return found()
