"""Available memory, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.core.system import control_groups
from paceline.engine import memory
from paceline.engine.cache import default_memory_bytes
from paceline.engine.memory import available_bytes

GIB = 1 << 30
NO_LIMIT_IN_V1 = 9223372036854771712

Files = dict[str, str | int]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available, and no groups yet."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    write(tmp_path, {"meminfo": f"MemTotal: {128 << 20} kB\nMemFree: 5 kB\nMemAvailable: {64 << 20} kB\n"})
    return tmp_path


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def v2(group: str, limit: int | str, used: int, files: int = 0) -> Files:
    stat = f"anon {used}\nfile {2 * files}\ninactive_file {files}\nactive_file {files}"
    return {
        f"groups/{group}/memory.max": limit,
        f"groups/{group}/memory.current": used,
        f"groups/{group}/memory.stat": stat,
    }


def v1(group: str, limit: int, used: int, files: int = 0) -> Files:
    stat = f"cache 7\ninactive_file 9\ntotal_inactive_file {files}"
    return {
        f"groups/memory/{group}/memory.limit_in_bytes": limit,
        f"groups/memory/{group}/memory.usage_in_bytes": used,
        f"groups/memory/{group}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("own", "files", "available"),
    [
        ("0::/", {}, 64 * GIB),
        ("0::/", v2(".", "max", 3 * GIB), 64 * GIB),
        ("0::/", v2(".", 8 * GIB, 3 * GIB), 5 * GIB),
        ("0::/", v2(".", 8 * GIB, 3 * GIB, files=GIB), 6 * GIB),
        ("0::/", v2(".", 8 * GIB, 9 * GIB), 0),
        ("0::/", v2(".", 500 * GIB, GIB), 64 * GIB),
        ("0::/pod/one", v2("pod", 4 * GIB, GIB) | v2("pod/one", "max", GIB), 3 * GIB),
        ("0::/pod/one", v2("pod", 40 * GIB, GIB) | v2("pod/one", 2 * GIB, GIB), GIB),
        ("0::/../other", v2("elsewhere", 2 * GIB, GIB), 64 * GIB),
        ("9:cpu:/\n4:memory:/a:b\n0::/", v1("a:b", 8 * GIB, 3 * GIB, files=GIB), 6 * GIB),
        ("4:memory:/docker/x", v1(".", 8 * GIB, 3 * GIB), 5 * GIB),
        ("4:cpu,memory:/x", v1("x", NO_LIMIT_IN_V1, 3 * GIB) | v1(".", NO_LIMIT_IN_V1, GIB), 64 * GIB),
        ("4:cpu:/x", v1("x", GIB, 0), 64 * GIB),
    ],
)
def test_available_memory_is_the_least_of_machine_and_groups(
    own: str, files: Files, available: int, system: Path
) -> None:
    """A container may have less memory than the machine."""
    write(system, {"own": own} | files)
    assert available_bytes() == available
    assert default_memory_bytes() == available // 4


def test_without_memory_figures_num_blocks_is_required(system: Path) -> None:
    """Where the system has no such files."""
    (system / "meminfo").unlink()
    assert available_bytes() is None
    with pytest.raises(InvalidArgumentError, match="must be given") as refused:
        default_memory_bytes()
    assert refused.value.field == "num_blocks"
