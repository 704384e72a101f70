"""Compiled functions work without a usable cache folder or file."""

from __future__ import annotations

import errno
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import CacheImpl, IndexDataCacheFile

from paceline.decoding.cpu import kernel_cache
from paceline.decoding.cpu.kernel_cache import kept_on_disk, warn_of_what_is_not_kept
from paceline.engine.backends.compiled import compile_lock

MODULE = """
from paceline.decoding.cpu.kernel_cache import kept_on_disk

@kept_on_disk(nogil=True)
def doubled(x):
    return 2 * x

@kept_on_disk(nogil=True)
def tripled(x):
    return 3 * x
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """The functions of a package of its own, as a process has them that has just imported it."""
    package = tmp_path / "kept_by_a_test"
    package.mkdir()
    for name, text in {"__init__": "", "functions": MODULE}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernel_cache, "_told", set())

    def loaded() -> list[Any]:
        for name in ("kept_by_a_test", "kept_by_a_test.functions"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module("kept_by_a_test.functions")
        return [module.doubled, module.tripled]

    return loaded


def files(function: Any, ending: str) -> list[Path]:
    name = function.py_func.__qualname__
    return [*Path(function.stats.cache_path).glob(f"*.{name}-*{ending}")]


def hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def test_a_full_disk_prevents_no_call(
    load: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(IndexDataCacheFile, "_save_data", full)
        assert [function(7) for function in load()] == [14, 21]
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert "No space left on device" in record.getMessage()
    assert [function(7) for function in load()] == [14, 21]
    again = load()
    assert [function(7) for function in again] == [14, 21]
    assert [hits(function) for function in again] == [1, 1], "what was begun is not in the way"


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_a_truncated_cache_file_is_rewritten(
    load: Callable[[], list[Any]], caplog: pytest.LogCaptureFixture, ending: str, left: int
) -> None:
    functions = load()
    assert [function(7) for function in functions] == [14, 21]
    for function in functions:
        (file,) = files(function, ending)
        file.write_bytes(file.read_bytes()[:left])
    damaged = load()
    assert [function(7) for function in damaged] == [14, 21]
    assert not any(hits(function) for function in damaged)
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()
    again = load()
    assert [function(7) for function in again] == [14, 21]
    assert [hits(function) for function in again] == [1, 1]


def test_an_unknown_numba_cache_is_left_alone() -> None:
    kernel_cache._spare_callers(object())


def test_a_function_that_cannot_be_cached_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a read-only container without a home folder."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(kernel_cache, "_not_kept", [])

    def doubled(x: int) -> int:
        return 2 * x

    def tripled(x: int) -> int:
        return 3 * x

    functions = [kept_on_disk(nogil=True)(function) for function in (doubled, tripled)]
    assert [function(7) for function in functions] == [14, 21]
    assert compile_lock.call(functions[0], 1.5) == 3, "without a folder there is no lock to take"
    with caplog.at_level(logging.WARNING):
        warn_of_what_is_not_kept()
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR" in record.getMessage()
    assert "only this user can write to" in record.getMessage(), "what is in it is run"


def test_no_warning_is_given_with_a_cache_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cache, "_not_kept", [])
    with caplog.at_level(logging.WARNING):
        warn_of_what_is_not_kept()
    assert not caplog.records


def test_compiling_is_logged_once_and_only_when_done(
    load: Callable[[], list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert [function(2) for function in load()] == [4, 6]
    (message,) = caplog.messages
    assert message.startswith("compiling for this processor, once")
    caplog.clear()
    kernel_cache._told.clear()
    assert [function(2) for function in load()] == [4, 6]
    assert caplog.messages == []
