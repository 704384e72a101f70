"""The pretended device of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.decoding.cuda import kernels
from tests.cuda.device import PretendedCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    # Triton cannot compile for this device, and its interpreter is no part of what is counted.
    monkeypatch.setattr(kernels, "_tried", lambda device: None)
    with PretendedCuda() as entered:
        yield entered
