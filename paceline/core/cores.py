"""Which processor cores threads run on, and for how many of them there is time.

Where two models and all that lies between them share two cores, every message wakes threads up, and the
system moves the others about. Engines that stay where they are never wait for each other, and find their
caches as they left them. Messages that stay away from the target's core keep nobody waiting but a draft that
drafts ahead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator

from paceline.core.control_groups import groups_around, lines
from paceline.core.errors import InvalidArgumentError

CAN_BIND = hasattr(os, "sched_setaffinity")

_QUOTA_AND_PERIOD = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""By controller, which version 2 does not name: the files that tell how long a group may compute in every
period, on all cores together. They say `max` or -1 where it may for as long as it likes."""


def usable_cores() -> tuple[int, ...]:
    """Those that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def core_quota() -> float:
    """For how many cores the control groups around this process give it time; infinite without a bound.

    In a container the cores are the machine's. What bounds the container is how much of their time it gets:
    threads that use it up are all stopped for the rest of the period.
    """
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    for controller, files in _QUOTA_AND_PERIOD.items():
        for group in groups_around(controller):
            words = [word for file in files for line in lines(group / file) for word in line.split()]
            match [int(word) for word in words if word.isdecimal()]:
                case [quota, period] if period:
                    yield quota / period


def within_quota(cores: int) -> int:
    """As many of these cores as there is time for, the last one perhaps in part; at least one."""
    return max(1, math.ceil(min(cores, core_quota())))


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


def check_threads(name: str, threads: int) -> None:
    """Raises InvalidArgumentError naming the field for more threads than this process may use cores: they
    spin while they wait for each other."""
    there = len(usable_cores())
    if threads > there:
        raise InvalidArgumentError(name, f"{threads} threads are more than the {there} cores of this process")


def bind_thread(cores: Collection[int]) -> None:
    """Keep the calling thread, and threads that it will start, on these cores; none leaves it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)
