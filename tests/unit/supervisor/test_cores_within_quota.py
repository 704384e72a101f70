"""Threads and lookahead of a stack within a quota of processor time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.supervisor import StackConfig

CPU: dict[str, Any] = {"target_device": "cpu", "draft_device": "cpu"}


def _machine(monkeypatch: pytest.MonkeyPatch, cores: int, quota: float) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: tuple(range(cores)))
    for module in ("core.system.cores", "supervisor.stack_config"):
        monkeypatch.setattr(f"paceline.{module}.core_quota", lambda: quota)


@pytest.mark.parametrize(
    ("quota", "threads", "alone"), [(math.inf, 32, 63), (8.0, 4, 7), (2.0, 1, 1), (1.5, 1, 1), (0.5, 1, 1)]
)
def test_workers_share_the_cores_of_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float, threads: int, alone: int
) -> None:
    """Of a machine with many more cores."""
    _machine(monkeypatch, 64, quota)
    both = StackConfig(**CPU)
    assert [both.worker_config(role).threads for role in both.worker_roles] == [threads, threads]
    assert StackConfig(draft_model=None, target_device="cpu").target_config.threads == alone


@pytest.mark.parametrize(("quota", "branches", "sequences"), [(1.0, 0, 1), (2.0, 8, 1), (3.0, 8, 256)])
def test_a_draft_drafts_ahead_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float, branches: int, sequences: int
) -> None:
    """With one core's time it would take the target's."""
    _machine(monkeypatch, 64, quota)
    config = StackConfig(**CPU)
    draft = config.draft_config
    assert (draft.lookahead_branches, draft.lookahead_sequences) == (branches, sequences)
    assert config.target_config.pre_verify is (quota > 1)
