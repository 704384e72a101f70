"""How numba compiles what a pass is made of."""

from __future__ import annotations

from typing import Any, Final

# NaN must come out where NaN goes in, so that a broken model is noticed: sums may be reordered (the same
# way for every row), nothing may be assumed about their values.
_MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": _MATH}
IN_ORDER: Final = OPTIONS | {"fastmath": False}
"""For sums in the order in which they are written. `fastmath` is of every instruction of a function, an
intrinsic's too, and what a function does not say it takes over from the one that calls it."""
