"""Where no folder can be written, compiled functions are called all the same."""

from __future__ import annotations

import logging

import pytest
from numba.core.caching import CacheImpl

from paceline.decoding import on_disk
from paceline.decoding.on_disk import kept_on_disk, warn_of_what_is_not_kept
from paceline.engine.compiled import first_call


def test_a_function_that_cannot_be_kept_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: in a read-only container without a home folder no worker could be imported."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(on_disk, "_not_kept", [])

    def doubled(x: int) -> int:
        return 2 * x

    def tripled(x: int) -> int:
        return 3 * x

    functions = [kept_on_disk(nogil=True)(function) for function in (doubled, tripled)]
    assert [function(7) for function in functions] == [14, 21]
    assert first_call.call(functions[0], 1.5) == 3, "without a folder there is no lock to take"
    with caplog.at_level(logging.WARNING):
        warn_of_what_is_not_kept()
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR" in record.getMessage()
    assert "nobody else may be able to write" in record.getMessage(), "what is in it is run"


def test_nothing_is_said_where_there_is_a_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_disk, "_not_kept", [])
    with caplog.at_level(logging.WARNING):
        warn_of_what_is_not_kept()
    assert not caplog.records
