"""Chi-square p-values without scipy, which transformers would import in every worker if installed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def p_value(observed: Sequence[float] | npt.NDArray[np.float64], expected: Sequence[float]) -> float:
    """Of Pearson's chi-square test: how often counts are as far from what is expected, or further."""
    found, wanted = np.asarray(observed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    half_freedom, half = (
        torch.tensor(value, dtype=torch.float64) for value in ((len(wanted) - 1) / 2, statistic / 2)
    )
    return float(torch.special.gammaincc(half_freedom, half))
