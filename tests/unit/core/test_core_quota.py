"""The quota of processor time, from files as the kernel writes them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.core.system import control_groups
from paceline.core.system.cores import core_quota, within_quota

Files = dict[str, str]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without groups."""
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    return tmp_path


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def v2(group: str, quota: int | str) -> Files:
    return {f"groups/{group}/cpu.max": f"{quota} 100000"}


def v1(group: str, quota: int, period: int = 100_000) -> Files:
    folder = f"groups/cpu/{group}"
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/", {}, math.inf),
        ("0::/", v2(".", "max"), math.inf),
        ("0::/", v2(".", 200_000), 2.0),
        ("0::/", v2(".", 150_000), 1.5),
        ("0::/pod/one", v2("pod", 400_000) | v2("pod/one", "max"), 4.0),
        ("0::/pod/one", v2("pod", 400_000) | v2("pod/one", 100_000), 1.0),
        ("0::/../other", v2("elsewhere", 100_000), math.inf),
        ("3:cpuset:/\n2:cpu,cpuacct:/a:b\n0::/", v1("a:b", 300_000), 3.0),
        ("2:cpu:/docker/x", v1(".", 25_000, 50_000), 0.5),
        ("2:cpu:/x", v1(".", -1) | v1("x", -1), math.inf),
        ("2:memory,cpuset:/x", v1("x", 100_000), math.inf),
        ("0::/", {"groups/cpu.max": ""}, math.inf),
    ],
)
def test_the_quota_is_the_least_of_all_groups(own: str, files: Files, quota: float, system: Path) -> None:
    """A container may have less time than the machine has cores."""
    write(system, {"own": own} | files)
    assert core_quota() == quota


def test_without_control_groups_there_is_no_quota(system: Path) -> None:
    assert core_quota() == math.inf
    assert within_quota(64) == 64


@pytest.mark.parametrize(
    ("quota", "cores", "within"),
    [("max", 64, 64), (200_000, 64, 2), (150_000, 64, 2), (10_000, 64, 1), (800_000, 4, 4), (0, 4, 1)],
)
def test_a_fraction_of_a_core_counts_as_one(quota: int | str, cores: int, within: int, system: Path) -> None:
    write(system, {"own": "0::/"} | v2(".", quota))
    assert within_quota(cores) == within
