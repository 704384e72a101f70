"""The pretended device of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.device import PretendedCuda


@pytest.fixture
def cuda() -> Iterator[PretendedCuda]:
    with PretendedCuda() as entered:
        yield entered


@pytest.fixture
def cuda_without_kernels() -> Iterator[PretendedCuda]:
    with PretendedCuda(noise_kernels=False) as entered:
        yield entered
