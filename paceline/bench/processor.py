"""Processor time of the processes under measurement, as the system counts it.

A rate moves with whatever else the machine does. The time that a token costs each process moves less, and
says which of them the others wait for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

CLIENT = "client"
PROCESSES = ("target", "draft", "coordinator", CLIENT)
"""Processes of one role count together: of those that an arm does not ask, each sleeps."""


class Processors:
    """The clocks of all processes of a run."""

    def __init__(self, pids: Mapping[str, Iterable[int]]) -> None:
        """`pids` of everything but the client, which is this process."""
        self._pids = {role: tuple(of_role) for role, of_role in pids.items()} | {CLIENT: (os.getpid(),)}

    def seconds(self) -> dict[str, float]:
        """Of each role since its processes began, all their threads together.

        Empty where the system does not tell, or when a process is gone: another one would begin at zero.
        """
        with suppress(OSError):
            return {role: sum(map(_seconds, pids)) for role, pids in self._pids.items()}
        return {}


def _seconds(pid: int) -> float:
    """Raises OSError."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no clock for another process")
    # clock_getcpuclockid(3), which Python does not offer: the complement of the pid above three bits, of
    # which 2 is the scheduler's clock. In nanoseconds, where /proc counts in hundredths of a second.
    return time.clock_gettime((~pid << 3) | 2)
