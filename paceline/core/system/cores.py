"""Processor cores and CPU quota of this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from paceline.core.errors import InvalidArgumentError
from paceline.core.system.control_groups import groups_around, lines

_QUOTA_AND_PERIOD = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""By controller (empty for cgroup version 2): the files with a group's CPU time per period, over all cores.
They contain `max` or -1 if there is no quota."""


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def core_quota() -> float:
    """CPU quota of the enclosing control groups, in cores; infinite without a bound.

    A container sees all cores of the machine, but its CPU time is limited: once its threads have used the
    quota, all of them stop for the rest of the period.
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
    """The number of cores within the quota, rounded up; at least one."""
    return max(1, math.ceil(min(cores, core_quota())))


def check_threads(name: str, threads: int) -> None:
    """Raises InvalidArgumentError naming the field for more threads than usable cores: threads spin while
    they wait for each other."""
    there = len(usable_cores())
    if threads > there:
        raise InvalidArgumentError(name, f"{threads} threads are more than the {there} cores of this process")
