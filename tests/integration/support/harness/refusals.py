"""Refusals: by the field that an InvalidArgumentError names, and by the code of a gRPC call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from paceline.core.errors import InvalidArgumentError


@contextlib.contextmanager
def refused(field: str, words: str | None = None) -> Iterator[pytest.ExceptionInfo[InvalidArgumentError]]:
    """The block raises an InvalidArgumentError that names this field, and matches the words if given."""
    with pytest.raises(InvalidArgumentError, match=words) as failure:
        yield failure
    named = failure.value.field
    assert named == field, f"{failure.value} names {named}, not {field}"


@contextlib.contextmanager
def ends_with(code: grpc.StatusCode) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises a gRPC error of this code."""
    with pytest.raises(grpc.RpcError) as failure:
        yield failure
    assert failure.value.code() is code
