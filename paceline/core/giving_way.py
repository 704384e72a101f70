"""Work that nobody waits for, on a core that others need: they take it at once, whenever they want it.

Linux lets whoever wakes up have a core at once where a thread of the policy SCHED_IDLE is on it; one of the
usual policy may first use its slice up, and with it the time in which a message would have been passed on.
Going back to the usual policy is a privilege (CAP_SYS_NICE, or a limit for RLIMIT_NICE of 20). Where a
process does not have it, nothing gives way.
"""

from __future__ import annotations

import functools
import os
import threading

AVAILABLE = hasattr(os, "SCHED_IDLE")


@functools.cache
def possible() -> bool:
    """Whether threads of this process may give way, and stop doing so. Tried once, on a thread for that."""
    came_back: list[bool] = []

    def there_and_back() -> None:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return  # somebody chose another policy for this process
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            hurry(0)
        except OSError:
            return
        came_back.append(os.sched_getscheduler(0) == os.SCHED_OTHER)

    if not AVAILABLE:
        return False
    thread = threading.Thread(target=there_and_back, name="giving-way")
    thread.start()
    thread.join()
    return came_back == [True]


def hurry(thread: int) -> None:
    """A thread, 0 for the calling one, gives way no more. Raises OSError where that is not allowed."""
    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
