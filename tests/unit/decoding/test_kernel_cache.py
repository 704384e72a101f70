"""Compiled code on disk is used until one of its sources changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llvmlite.binding import FeatureMap

from paceline.decoding.cpu import kernel_cache
from paceline.decoding.cpu.kernel_cache import sources_of

CALLED = """
from numba import njit
from thing.numbers import ADDEND

@njit
def called(x):
    return x + ADDEND
"""

CALLER = """
from paceline.decoding.cpu.kernel_cache import kept_on_disk
from thing.called import called

@kept_on_disk(nogil=True)
def caller(x):
    return called(x)

@kept_on_disk(nogil=True)
def caller_too(x):
    return called(x) + 100
"""

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from thing.caller import caller, caller_too
print(caller(1), caller_too(1), *(sum(f.stats.cache_hits.values()) for f in (caller, caller_too)))
"""


def _run(folder: Path) -> list[int]:
    found = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, str(folder)], capture_output=True, check=True
    )
    return [int(word) for word in found.stdout.split()]


def _kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "thing" / "__pycache__").glob("*.nb[ci]"))


def test_code_is_kept_until_one_of_its_sources_changes(tmp_path: Path) -> None:
    package = tmp_path / "thing"
    package.mkdir()
    sources = {"__init__": "", "numbers": "ADDEND = 1\n", "called": CALLED, "caller": CALLER}
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    assert _run(tmp_path) == [2, 102, 0, 0]
    assert _run(tmp_path) == [2, 102, 1, 1]
    kept = _kept(tmp_path)

    (package / "numbers.py").write_text("ADDEND = 5\n")
    assert _run(tmp_path) == [6, 106, 0, 0], "a number in a file that the called function's file imports"
    (package / "called.py").write_text(CALLED.replace("x +", "x -"))
    assert _run(tmp_path) == [-4, 96, 0, 0], "the function called, in another file than its caller"
    assert len(_kept(tmp_path)) == len(kept)
    assert not set(_kept(tmp_path)) & set(kept), "what is out of date is removed"
    assert _run(tmp_path) == [-4, 96, 1, 1]


@pytest.fixture
def digest_beside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Of a module, on a processor that has wide vectors, or has not."""

    def digest(*, wide: bool) -> str:
        monkeypatch.setattr(kernel_cache, "get_host_cpu_features", lambda: FeatureMap({"avx512f": wide}))
        return str(kernel_cache._digest_of.__wrapped__("paceline.engine.backends.compiled.chain"))

    return digest


def test_a_named_processors_code_is_kept_apart(
    digest_beside: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba keeps it by the name alone; weights lie in memory as suits the processor."""
    monkeypatch.setattr(kernel_cache.config, "ENABLE_AVX", 1)
    as_it_is = digest_beside(wide=True)
    assert digest_beside(wide=False) == as_it_is, "numba itself tells them apart"
    monkeypatch.setattr(kernel_cache.config, "CPU_NAME", "haswell")
    assert len({as_it_is, digest_beside(wide=True), digest_beside(wide=False)}) == 3


def test_code_without_wide_vectors_is_kept_apart(
    digest_beside: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba then leaves them out of what it keeps code by; weights lie in memory as with them."""
    monkeypatch.setattr(kernel_cache.config, "ENABLE_AVX", 0)
    assert digest_beside(wide=True) != digest_beside(wide=False)


def test_a_chains_sources_include_all_it_calls() -> None:
    sources = sources_of("paceline.engine.backends.compiled.chain")
    names = {f"{path.parent.name}/{path.stem}" for path in sources}
    calls = {f"compiled/{name}" for name in ("chain", "kernels", "gemm", "tiles")}
    draws = {"decoding/gumbel_argmax", "decoding/noise"}
    kernels = {f"cpu/{name}" for name in ("distributions", "philox", "kernel_cache")}
    assert names >= calls | draws | kernels
    assert "compiled/backend" not in names, "nothing that only calls it"
