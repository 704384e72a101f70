"""CUDA devices that cannot exist are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.core.system import gpus


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_torch_build", lambda: "2.13.0+cu130")
    monkeypatch.setattr(gpus.sys, "platform", "linux")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Device nodes of two GPUs, and of what is none."""
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:1"])
def test_possible_devices_pass(device: str, two: Path) -> None:
    gpus.check_gpu("device", device, {}, two)


@pytest.mark.parametrize(
    ("device", "environment", "said"),
    [
        ("cuda:2", {}, "has 2 GPUs"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES='3' leaves 1 GPUs"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, "leaves 0 GPUs"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "-1,0"}, "leaves 0 GPUs"),
    ],
)
def test_impossible_devices_are_refused(
    device: str, environment: dict[str, str], said: str, two: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as refused:
        gpus.check_gpu("draft_device", device, environment, two)
    assert refused.value.field == "draft_device"
    assert "`auto` takes a GPU if there is one" in refused.value.description


def test_a_torch_without_cuda_is_reported(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_torch_build", lambda: "2.13.0+cpu")
    with pytest.raises(InvalidArgumentError, match="needs torch with CUDA"):
        gpus.check_gpu("device", "cuda", {}, two)


@pytest.mark.parametrize("node", ["dxg", "kfd", "nvhost-gpu"])
def test_gpus_without_their_own_device_node_pass(node: str, tmp_path: Path) -> None:
    (tmp_path / node).touch()
    gpus.check_gpu("device", "cuda:3", {}, tmp_path)
