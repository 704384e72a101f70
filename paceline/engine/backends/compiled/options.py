"""Options for compiling the parts of a pass with numba."""

from __future__ import annotations

from typing import Any, Final

# NaN inputs must give NaN outputs, so that a broken model is noticed: sums may be reordered (the same way for
# every row), but no assumption about values is allowed.
_MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": _MATH}
