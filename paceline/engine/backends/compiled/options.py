"""How numba compiles what a pass is made of."""

from __future__ import annotations

from typing import Any, Final

# NaN must come out where NaN goes in, so that a broken model is noticed: sums may be reordered (the same
# way for every row), nothing may be assumed about their values.
_MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": _MATH}
