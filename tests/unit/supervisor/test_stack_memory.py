"""How a stack gives each worker its part of a GPU's memory, or its number of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from paceline.supervisor import StackConfig

ONE = {"target_device": "cuda:0", "draft_device": "cuda"}
TWO = {"target_device": "cuda:0", "draft_device": "cuda:1"}
CPU = {"target_device": "cpu", "draft_device": "cpu"}
MIXED = {"target_device": "cuda", "draft_device": "cpu"}


def of(**values: Any) -> list[tuple[int | None, float | None]]:
    """Blocks and share of the target, then of the draft."""
    config = StackConfig(**values)
    workers = map(config.worker_config, config.worker_roles)
    return [(worker.num_blocks, worker.gpu_memory_utilization) for worker in workers]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (ONE, [(None, 0.595), (None, 0.255)]),
        ({**ONE, "gpu_memory_utilization": 0.9}, [(None, 0.63), (None, 0.27)]),
        ({**ONE, "draft_gpu_memory_utilization": 0.1}, [(None, 0.595), (None, 0.1)]),
        ({**ONE, "num_blocks": 9}, [(9, None), (9, None)]),
        ({**ONE, "target_num_blocks": 9}, [(9, None), (None, 0.255)]),
        ({**ONE, "num_blocks": 9, "draft_num_blocks": 5}, [(9, None), (5, None)]),
        ({**ONE, "num_blocks": 9, "draft_gpu_memory_utilization": 0.2}, [(9, None), (None, 0.2)]),
        ({**ONE, "draft_model": None}, [(None, None)]),
        (TWO, [(None, None), (None, None)]),
        ({**TWO, "gpu_memory_utilization": 0.9}, [(None, 0.9), (None, 0.9)]),
        (CPU, [(None, None), (None, None)]),
        (MIXED, [(None, None), (None, None)]),
        ({**MIXED, "gpu_memory_utilization": 0.9}, [(None, 0.9), (None, None)]),
        ({**ONE, "target": {"num_blocks": 3}}, [(3, None), (None, 0.255)]),
        ({**ONE, "drafter": "ngram"}, [(None, None), (None, None)]),
        ({**ONE, "draft": {"drafter": "ngram"}, "gpu_memory_utilization": 0.9}, [(None, 0.9), (None, None)]),
    ],
)
def test_each_worker_gets_its_share_of_memory(
    values: dict[str, Any], expected: list[tuple[int | None, float | None]]
) -> None:
    if values.get("draft_model", "") is None:
        values = {**values, "draft_device": "auto"}
    assert of(**values) == expected


def test_auto_means_the_first_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config._DEVICES", tmp_path)
    assert of() == [(None, None), (None, None)]
    (tmp_path / "nvidia0").touch()
    assert of() == [(None, 0.595), (None, 0.255)]
    assert of(draft_device="cuda:1") == [(None, None), (None, None)]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({**ONE, "gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({**ONE, "gpu_memory_utilization": 0.9, "num_blocks": 9}, "gpu_memory_utilization"),
        ({**CPU, "gpu_memory_utilization": 0.9}, "gpu_memory_utilization"),
        ({**MIXED, "draft_gpu_memory_utilization": 0.9}, "draft_gpu_memory_utilization"),
        ({**TWO, "target_gpu_memory_utilization": 0.0}, "target_gpu_memory_utilization"),
        ({**ONE, "draft_num_blocks": 3, "draft_gpu_memory_utilization": 0.4}, "draft_gpu_memory_utilization"),
        ({**ONE, "draft_num_blocks": 0}, "draft_num_blocks"),
        ({"draft_model": None, "draft_num_blocks": 3}, "draft_num_blocks"),
        ({"draft_model": None, "drafter": "ngram"}, "drafter"),
        ({"draft_model": None, "corpus": "text"}, "corpus"),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, Any], field: str) -> None:
    with refused(field):
        StackConfig(**values)


def test_shares_above_a_whole_gpu_are_refused_with_the_sum() -> None:
    told = r"is 0\.4, and .* 0\.7 of that GPU: 1\.1 in total"
    with refused("draft_gpu_memory_utilization", told):
        StackConfig(**ONE, target_gpu_memory_utilization=0.7, draft_gpu_memory_utilization=0.4)
