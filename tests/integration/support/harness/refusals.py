"""Refusals: by the field that an InvalidArgumentError names, and by the code of a gRPC call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from paceline.core.errors import InvalidArgumentError


@contextlib.contextmanager
def refused(field: str) -> Iterator[None]:
    """The block raises an InvalidArgumentError that names this field."""
    with pytest.raises(InvalidArgumentError) as failure:
        yield
    assert failure.value.field == field


@contextlib.contextmanager
def ends_with(code: grpc.StatusCode) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises a gRPC error of this code."""
    with pytest.raises(grpc.RpcError) as failure:
        yield failure
    assert failure.value.code() is code
