"""Whether two targets compute the same, by what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import FailedPreconditionError
from paceline.engine.loading.model_fingerprint import model_fingerprint
from paceline.rpc.codec.info import check_same_model
from paceline.v1 import common_pb2

KNOWN: dict[str, Any] = {"model": "a", "model_fingerprint": "1", "dtype": "float32"}


@pytest.mark.parametrize("changes", [{}, {"model": "b"}, {"model_fingerprint": "", "dtype": "bfloat16"}])
def test_equal_weights_serve_together(changes: dict[str, str]) -> None:
    """Paths may differ by machine; older workers do not tell their weights."""
    check_same_model(common_pb2.WorkerInfo(**KNOWN), common_pb2.WorkerInfo(**KNOWN | changes))


@pytest.mark.parametrize(("name", "value"), [("model_fingerprint", "2"), ("dtype", "bfloat16")])
def test_a_difference_is_named(name: str, value: str) -> None:
    other = common_pb2.WorkerInfo(**KNOWN | {"model": "b", name: value})
    with pytest.raises(FailedPreconditionError, match=f"{name} is {value} for b, {KNOWN[name]} for a"):
        check_same_model(common_pb2.WorkerInfo(**KNOWN), other)


def made(seed: int = 0, width: int = 40) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(50, width), nn.Linear(width, 50))


def test_a_fingerprint_depends_on_weights_and_shapes() -> None:
    narrow, wide, changed = made(width=20), made(), made()
    with torch.no_grad():
        changed.get_parameter("1.bias")[3] += 1e-6
    prints = [model_fingerprint(model) for model in (made(), made(1), narrow, changed)]
    assert len(set(prints)) == 4
    assert prints[0] == model_fingerprint(wide)


def test_a_dtype_that_holds_the_values_changes_nothing() -> None:
    model = made().bfloat16()
    assert model_fingerprint(model) == model_fingerprint(model.float())
