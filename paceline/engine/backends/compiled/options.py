"""Options for compiling the parts of a pass with numba."""

from __future__ import annotations

from typing import Any, Final

# A NaN input must give a NaN output, so that a broken model is detected. These flags therefore permit
# reordered sums (in the same order for every row), but not `nnan` and `ninf`, which assume finite values.
_MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": _MATH}
