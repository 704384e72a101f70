"""Warnings of a setup that drafts less than it could."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.setup_warnings import setup_warnings
from paceline.core.config import CoordinatorConfig
from paceline.core.types import AcceptanceMode
from paceline.core.validation import DraftTokens, TreeWidth
from paceline.v1 import common_pb2


def worker(model: str, length: int) -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo(model=model, max_model_len=length)


def settings(k: DraftTokens = "auto", **changes: Any) -> CoordinatorConfig:
    return CoordinatorConfig(targets=("t:1",), tokenizer="t", num_speculative_tokens=k, **changes)


TARGET = worker("large", 2048)


def test_a_draft_as_long_as_the_target_is_no_warning() -> None:
    drafts = [worker("small", 2048), worker("longer", 4096)]
    assert setup_warnings(settings("auto"), TARGET, drafts) == setup_warnings(settings(4), TARGET, []) == []
    assert setup_warnings(settings(0), TARGET, []) == []


def test_a_shorter_draft_names_both_lengths() -> None:
    (warning,) = setup_warnings(settings("auto"), TARGET, [worker("small", 1024)])
    for word in ("small", "1024", "2048"):
        assert word in warning


def test_an_idle_draft_is_named() -> None:
    (warning,) = setup_warnings(settings(0), TARGET, [worker("small", 2048)] * 2)
    assert "num_speculative_tokens is 0" in warning
    assert "small" in warning


@pytest.mark.parametrize("k", [0, 3])
def test_each_problem_is_one_warning(k: int) -> None:
    assert len(setup_warnings(settings(k), TARGET, [worker("small", 1024)])) == (2 if k == 0 else 1)


@pytest.mark.parametrize(("device", "branches", "told"), [("cuda:0", 0, 1), ("cuda:0", 8, 0), ("cpu", 0, 0)])
def test_a_draft_on_a_gpu_that_does_not_draft_ahead_is_named(device: str, branches: int, told: int) -> None:
    draft = common_pb2.WorkerInfo(
        model="small", max_model_len=2048, device=device, lookahead_branches=branches
    )
    warnings = setup_warnings(settings("auto"), TARGET, [draft])
    assert len(warnings) == told
    for warning in warnings:
        assert warning == "the draft small on cuda:0 does not draft ahead (its lookahead_branches is 0)"


@pytest.mark.parametrize("width", [1, 3, "auto"])
def test_workers_without_trees_are_named_if_there_should_be_trees(width: TreeWidth) -> None:
    branching = common_pb2.WorkerInfo(model="branching", max_model_len=2048, max_tree_nodes=64)
    config = settings(tree_width=width)
    assert setup_warnings(config, branching, [branching]) == []
    warnings = setup_warnings(config, TARGET, [worker("small", 2048), branching])
    named = ["the target large", "the draft small"] if width != 1 else []
    assert warnings == [f"{each} takes no trees: its rounds have chains" for each in named]


def test_a_width_that_nothing_chooses_is_told() -> None:
    branching = common_pb2.WorkerInfo(model="branching", max_model_len=2048, max_tree_nodes=64)
    for config in (
        settings(4, tree_width="auto"),
        settings(tree_width="auto", num_speculative_tokens_per_batch_size="[[1, 4, 5]]"),
    ):
        (warning,) = setup_warnings(config, branching, [branching])
        assert warning.startswith("tree_width is auto")
    assert setup_warnings(settings(4, tree_width=3), branching, [branching]) == []


def test_missing_drafts_of_several_are_told() -> None:
    drafts = [common_pb2.WorkerInfo(model=m, max_model_len=2048, instance_id=m) for m in ("one", "other")]
    config = settings(drafts_per_sequence=2)
    assert setup_warnings(config, TARGET, drafts) == setup_warnings(config, TARGET, []) == []
    (warning,) = setup_warnings(config, TARGET, drafts[:1])
    assert warning == "drafts_per_sequence is 2, but there are fewer draft workers (1)"
    assert setup_warnings(config, TARGET, drafts[:1], num_awaited=1) == []


@pytest.mark.parametrize(("mode", "told"), [("coupled", 1), ("rejection", 0)])
def test_drafts_of_one_model_that_propose_the_same_are_told(mode: str, told: int) -> None:
    drafts = [
        common_pb2.WorkerInfo(
            model="small", max_model_len=2048, instance_id=f"{i}", model_fingerprint=weights
        )
        for i, weights in enumerate(("a", "a", "b"))
    ]
    config = settings(drafts_per_sequence=2, acceptance=AcceptanceMode(mode))
    assert setup_warnings(config, TARGET, drafts) == setup_warnings(config, TARGET, drafts[1:]) == []
    warnings = setup_warnings(config, TARGET, drafts[:2])
    assert len(warnings) == told
    for warning in warnings:
        assert warning.startswith("drafts_per_sequence is 2, but the drafts are of fewer models (1)")
