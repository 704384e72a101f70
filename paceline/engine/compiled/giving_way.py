"""Giving a core up to whoever wants it while compiled code runs: paceline/core/giving_way.py says why.

It is done here and not around the call: a thread that gives way while it holds the interpreter's lock could
keep everybody of its process waiting for as long as others want the core.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.core.giving_way import AVAILABLE

_I32 = ir.IntType(32)


def _becoming(name: str) -> Any:
    @intrinsic
    def become(typing: Any) -> Any:
        """Change the calling thread's policy; nothing happens where that is refused."""

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            if AVAILABLE:
                priority = cgutils.alloca_once_value(b, ir.Constant(_I32, 0))
                kind = ir.FunctionType(_I32, [_I32, _I32, _I32.as_pointer()])
                function = cgutils.get_or_insert_function(b.module, kind, "sched_setscheduler")
                b.call(function, [ir.Constant(_I32, 0), ir.Constant(_I32, getattr(os, name)), priority])
            return context.get_dummy_value()

        return types.void(), generate

    return become


give_way = _becoming("SCHED_IDLE")
hurry = _becoming("SCHED_OTHER")
