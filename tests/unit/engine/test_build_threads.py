"""The number of threads of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.config import TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading.build import build


@pytest.mark.parametrize(
    ("settings", "quota", "threads"),
    [
        ({}, 2.0, 2),
        ({}, 1.5, 2),
        ({}, 64.0, None),
        ({"threads": 3}, 2.0, 3),
    ],
)
def test_torch_gets_no_more_threads_than_the_quota(
    settings: dict[str, Any], quota: float, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []

    def load_model(*_: Any, **__: Any) -> Any:
        raise InvalidArgumentError("model", "is not loaded")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("paceline.core.system.cores.core_quota", lambda: quota)
    monkeypatch.setattr("paceline.engine.loading.build.load_model", load_model)
    with pytest.raises(InvalidArgumentError, match="is not loaded"):
        build(TargetConfig(model="embedded:target", device="cpu", **settings))
    assert chosen == ([] if threads is None else [threads])
