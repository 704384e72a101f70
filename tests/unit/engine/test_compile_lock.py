"""Of several processes one compiles what is not on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock, Timeout

from paceline.engine.backends.compiled import compile_lock

PROGRAM = """
import sys
from paceline.engine.backends.compiled import compile_lock
sys.path.insert(0, sys.argv[1])
from slow_to_compile import function
print("ready", flush=True)
sys.stdin.readline()
compile_lock.call(function, 1.0)
print(sum(function.stats.cache_misses.values()), sum(function.stats.cache_hits.values()))
"""

BRANCHES = "\n".join(f"    if x > {i}:\n        x = x * {i}.5 + {i}" for i in range(60))
FUNCTION = f"""
from numba import njit

@njit(cache=True)
def function(x):
{BRANCHES}
    return x
"""


def test_processes_starting_together_compile_once(tmp_path: Path) -> None:
    Path(tmp_path, "slow_to_compile.py").write_text(FUNCTION)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        found = sorted(child.communicate(timeout=60)[0] for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert found == ["0 1\n", "1 0\n"], "misses and hits of the cache on disk"


class Compiled:
    """Says whether its folder is locked while it is called."""

    def __init__(self, folder: Path, signatures: tuple[Any, ...] = ()) -> None:
        self.signatures = signatures
        self.stats = SimpleNamespace(cache_path=str(folder))
        self.locked: list[bool] = []

    def __call__(self, *args: int) -> None:
        assert args == (1, 2)
        self.locked.append(_is_locked(Path(self.stats.cache_path)))


def _is_locked(folder: Path) -> bool:
    try:
        with FileLock(folder / "compiling.lock", timeout=0):
            return False
    except Timeout:
        return True


def test_a_first_call_holds_and_releases_the_lock(tmp_path: Path) -> None:
    compiled = Compiled(tmp_path)
    compile_lock.call(compiled, 1, 2)
    assert compiled.locked == [True]
    assert not _is_locked(tmp_path)


def test_later_calls_take_no_lock(tmp_path: Path) -> None:
    compiled = Compiled(tmp_path, signatures=("of an earlier call",))
    with FileLock(tmp_path / "compiling.lock"):
        compile_lock.call(compiled, 1, 2)
    assert compiled.locked == [True], "it did not wait for who holds it"


def test_a_failed_compilation_releases_the_lock(tmp_path: Path) -> None:
    def broken() -> None:
        raise TypeError("no such type")

    compiled: Any = broken
    compiled.signatures, compiled.stats = (), SimpleNamespace(cache_path=str(tmp_path))
    with pytest.raises(TypeError, match="no such type"):
        compile_lock.call(compiled)
    with FileLock(tmp_path / "compiling.lock", timeout=0):
        pass


@pytest.mark.parametrize("folder", [None, "a file"])
def test_without_a_lock_folder_the_function_is_called(tmp_path: Path, folder: str | None) -> None:
    at = None if folder is None else tmp_path / folder
    if at is not None:
        at.write_text("")
    calls: list[tuple[int, ...]] = []

    def compiled(*args: int) -> None:
        calls.append(args)

    anything: Any = compiled
    anything.signatures, anything.stats = (), SimpleNamespace(cache_path=at and str(at))
    compile_lock.call(anything, 1, 2)
    assert calls == [(1, 2)]
