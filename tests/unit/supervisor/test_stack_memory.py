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


GIB = 1 << 30


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are `8b` and `1b`, of as many half GiB of weights as 30 and 4; those of others are unknown."""
    sizes = {"8b": 15 * GIB, "1b": 2 * GIB}
    monkeypatch.setattr("paceline.supervisor.devices.weight_bytes", sizes.get)


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


def test_several_drafts_divide_a_gpu_with_the_target_or_among_themselves() -> None:
    models = ("1b", "elsewhere")
    assert of(**ONE, draft_model=models) == [(None, 0.595), (None, 0.1275), (None, 0.1275)]
    assert of(**TWO, draft_model=models) == [(None, None), (None, 0.425), (None, 0.425)]
    assert of(**CPU, draft_model=models) == [(None, None)] * 3
    known = of(**ONE, target_model="8b", draft_model=("1b", "8b"))
    assert known == [(None, round(0.85 * size / 67, 4)) for size in (31, 5, 31)]
    with refused("draft_gpu_memory_utilization", r"draft 0\.4, draft-2 0\.4 of one GPU are 1\.395 in total"):
        StackConfig(**ONE, draft_model=models, draft_gpu_memory_utilization=0.4)


KNOWN = {**ONE, "target_model": "8b", "draft_model": "1b"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (KNOWN, [(None, round(0.85 * 31 / 36, 4)), (None, round(0.85 * 5 / 36, 4))]),
        ({**KNOWN, "gpu_memory_utilization": 0.9}, [(None, 0.775), (None, 0.125)]),
        ({**KNOWN, "draft_gpu_memory_utilization": 0.2}, [(None, 0.7319), (None, 0.2)]),
        ({**KNOWN, "draft": {"model": "8b"}}, [(None, 0.425), (None, 0.425)]),
        ({**KNOWN, "draft_model": "elsewhere"}, [(None, 0.595), (None, 0.255)]),
        ({**TWO, "target_model": "8b", "draft_model": "1b"}, [(None, None), (None, None)]),
    ],
)
def test_a_gpu_is_divided_by_weights_if_they_are_known(
    values: dict[str, Any], expected: list[tuple[int | None, float | None]]
) -> None:
    """In proportion to them, half a GiB added to each."""
    assert of(**values) == expected


def test_both_shares_of_24_gib_hold_8b_and_1b() -> None:
    (_, target), (_, draft) = of(**KNOWN, gpu_memory_utilization=0.9)
    assert target is not None
    assert draft is not None
    assert 24 * target > 15 + 3
    assert 24 * draft > 2 + 0.9


@pytest.mark.parametrize(
    ("values", "branches"),
    [
        (ONE, 0),
        ({**ONE, "lookahead_branches": 3}, 3),
        ({**ONE, "draft": {"lookahead_branches": 3}}, 3),
        (TWO, 8),
        (MIXED, 8),
    ],
)
def test_a_draft_on_the_targets_gpu_does_not_draft_ahead(values: dict[str, Any], branches: int) -> None:
    config = StackConfig(**values)
    assert config.draft_config.lookahead_branches == branches
    assert bool(config.sharing) is (branches < 8)


def test_sharing_a_gpu_is_told() -> None:
    assert StackConfig(**ONE, target_num_blocks=7).sharing == (
        "both models share a GPU (of its memory: target by its blocks, draft 0.255); "
        "the draft does not draft ahead"
    )
    assert StackConfig(**ONE, lookahead_branches=2).sharing.endswith("the draft drafts ahead for 2 outcomes")
    assert StackConfig(**TWO).sharing == StackConfig(**CPU).sharing == ""
    assert StackConfig(target_device="cuda", draft_model=None).sharing == ""


def test_auto_means_the_first_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.supervisor.devices._DEVICES", tmp_path)
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
        ({"draft_model": None, "sub_drafter": "ngram"}, "sub_drafter"),
        ({"draft_model": None, "drafts_per_sequence": 2}, "drafts_per_sequence"),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, Any], field: str) -> None:
    with refused(field):
        StackConfig(**values)


def test_shares_above_a_whole_gpu_are_refused_with_the_sum() -> None:
    told = r"target 0\.7, draft 0\.4 of one GPU are 1\.1 in total"
    with refused("draft_gpu_memory_utilization", told):
        StackConfig(**ONE, target_gpu_memory_utilization=0.7, draft_gpu_memory_utilization=0.4)
