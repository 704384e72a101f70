"""How many processor cores this process may use, and for how many of them there is time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from paceline.core.errors import InvalidArgumentError
from paceline.core.system.control_groups import groups_around, lines

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


def check_threads(name: str, threads: int) -> None:
    """Raises InvalidArgumentError naming the field for more threads than this process may use cores: they
    spin while they wait for each other."""
    there = len(usable_cores())
    if threads > there:
        raise InvalidArgumentError(name, f"{threads} threads are more than the {there} cores of this process")
