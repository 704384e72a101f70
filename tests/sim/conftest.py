"""Shorter output: planted crashes are many, and prompts are short."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="paceline.engine.scheduling.passes")


@pytest.fixture(autouse=True)
def prompts_are_scored_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fault never strikes between two parts of one prompt's log-probabilities."""
    monkeypatch.setattr("paceline.engine.scheduling.planner.SCORED_ROWS", 3)
