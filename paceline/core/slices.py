"""How long a thread keeps a processor core before another one's turn, where the system lets it choose.

A message is a moment's work for whoever carries it, and wakes them while engines compute on all cores. Linux
lets a thread that asks for short slices take a core at once from one that does not; the others wait until
the slice in progress is over, which is as long as a small pass. What a thread gets in all stays the same.
"""

from __future__ import annotations

import ctypes
import struct

from paceline.core.system_calls import succeeds

SHORT_NS = 100_000
"""The shortest slice there is."""
_USUAL_NS = 0
_SET = {"x86_64": 314, "aarch64": 274}
"""Number of the system call sched_setattr."""
_GET = {"x86_64": 315, "aarch64": 275}
"""The same of sched_getattr."""
_THIS_THREAD = 0
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, two clamps."""
_RUNTIME = 5
_FAIR = (0, 3)
"""The policies SCHED_OTHER and SCHED_BATCH, for which `runtime` is the slice, from Linux 6.12 on."""


def shorten() -> bool:
    """Ask for short slices for this thread and those that it starts; False where they are not given."""
    return _ask_for(SHORT_NS) == SHORT_NS


def restore() -> None:
    """Go back to slices as everybody has them, for this thread and those that it starts."""
    _ask_for(_USUAL_NS)


def current() -> int:
    """Nanoseconds of this thread's slices; 0 where that cannot be said."""
    attributes = _get()
    return 0 if attributes is None else int(attributes[_RUNTIME])


def _ask_for(nanoseconds: int) -> int:
    """What it is then. Refusals (an old kernel, a sandbox) change nothing: it is a matter of speed only."""
    attributes = _get()
    if attributes is None:
        return 0
    attributes[_RUNTIME] = nanoseconds
    succeeds(_SET, _THIS_THREAD, ctypes.create_string_buffer(_ATTRIBUTES.pack(*attributes)), 0)
    return current()


def _get() -> list[int] | None:
    """This thread's attributes; None where there are none, or another policy than the usual ones."""
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if not succeeds(_GET, _THIS_THREAD, buffer, _ATTRIBUTES.size, 0):
        return None
    attributes = list(_ATTRIBUTES.unpack(buffer.raw))
    return attributes if attributes[1] in _FAIR else None
