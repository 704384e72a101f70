"""Which processor cores threads run on.

Where two models and all that lies between them share two cores, every message wakes threads up, and the
system moves the others about. Engines that stay where they are never wait for each other, and find their
caches as they left them. Messages that stay away from the target's core keep nobody waiting but a draft that
drafts ahead.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from paceline.core.errors import InvalidArgumentError

CAN_BIND = hasattr(os, "sched_setaffinity")


def usable_cores() -> tuple[int, ...]:
    """Those that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def check_cores(cores: Collection[int], name: str = "cores") -> None:
    """Raises InvalidArgumentError naming the field where this process may not use one of them."""
    if not cores:
        return
    if not CAN_BIND:
        raise InvalidArgumentError(name, "cannot be chosen on this system")
    usable = usable_cores()
    if missing := sorted(set(cores).difference(usable)):
        there = ", ".join(map(str, usable))
        raise InvalidArgumentError(name, f"include {missing[0]}; this process may use {there}")


def bind_thread(cores: Collection[int]) -> None:
    """Keep the calling thread, and threads that it will start, on these cores; none leaves it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)
