"""The table of `paceline status` shows what the server reported, verbatim."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.commands.generate import _summary, _worker_row, status_table
from paceline.client import ServerStatus
from paceline.client.server_status import status_from_proto
from paceline.v1 import common_pb2, generation_pb2

ADDRESS = "[fe80::1%eth0]:50151"


def status(*workers: generation_pb2.WorkerStatus, **coordinator: Any) -> ServerStatus:
    told = generation_pb2.CoordinatorStatus(address=ADDRESS, **coordinator)
    return status_from_proto(generation_pb2.GetStatusResponse(coordinator=told, workers=workers))


@pytest.mark.parametrize("reason", ["the file models/[bold]/draft", "expected [/end], got [5, 6]"])
def test_reasons_and_addresses_are_printed_verbatim(reason: str) -> None:
    lost, refused = generation_pb2.WORKER_STATE_LOST, generation_pb2.WORKER_STATE_REFUSED
    info = common_pb2.WorkerInfo(
        model="models/[old]/draft",
        device="cpu",
        dtype="float32",
        num_parameters=1_000_000,
        cache=common_pb2.CacheInfo(block_size=16, total_blocks=64, free_blocks=60, sequences=1),
    )
    one = generation_pb2.WorkerStatus(address="[fd00::2]:5", role="target", state=refused, reason=reason)
    other = generation_pb2.WorkerStatus(
        address="[fd00::3]:5", role="draft", state=lost, reason=reason, info=info
    )
    console = Console(file=io.StringIO(), width=400, highlight=False)
    console.print(status_table(status(one, other)))
    coordinator, target, draft = console.file.getvalue().splitlines()[1:]
    assert ADDRESS in coordinator
    assert one.address in target
    assert f"refused ({reason})" in target
    assert other.address in draft
    assert f"lost ({reason})" in draft
    assert f"{info.model}, 1.0M, float32, cpu" in draft
    assert "64 of 1,024" in draft
    assert "none yet" in draft


def test_a_draft_without_a_model_is_shown_by_its_drafter() -> None:
    info = common_pb2.WorkerInfo(
        model="a/model", dtype="float32", device="cpu", drafter="stacked:ngram+bigram"
    )
    (row,) = status(generation_pb2.WorkerStatus(role="draft", info=info)).workers
    assert _worker_row(row)[4] == "stacked:ngram+bigram, with the tokenizer of a/model"


@pytest.mark.parametrize(
    ("told", "shown"), [({"serving": True}, "ready"), ({"serving": False}, "not serving"), ({}, "unknown")]
)
def test_a_coordinator_without_a_target_is_not_ready(told: dict[str, bool], shown: str) -> None:
    (cells,) = [
        [*column.cells] for column in status_table(status(**told)).columns if column.header == "state"
    ]
    assert [str(cell) for cell in cells] == [shown]


def test_counts_are_named_as_completions() -> None:
    """A request with `n` of 3 counts as three."""
    told = _summary(status(finished_requests=3, failed_requests=1), "http")
    assert "3 finished, 1 failed completions (each of n)" in told


def test_coordinator_warnings_are_shown() -> None:
    warnings = ["a draft is short", "a draft is idle"]
    shown = _summary(status(warnings=warnings), "http").splitlines()[-2:]
    assert shown == [f"warning: {warning}" for warning in warnings]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"tree_width": 1, "max_tree_nodes": 16, "drafts_per_sequence": 1}, "K = 4, acceptance"),
        ({"tree_width": 3, "max_tree_nodes": 9}, "K = 4, tree width 3, up to 9 nodes, acceptance"),
        ({"auto_tree_width": True, "max_tree_nodes": 9}, "K = 4, tree width auto, up to 9 nodes, acceptance"),
        ({"drafts_per_sequence": 2, "max_tree_nodes": 9}, "K = 4, 2 drafts, up to 9 nodes, acceptance"),
    ],
)
def test_trees_are_told_where_there_are_any(settings: dict[str, Any], shown: str) -> None:
    assert _summary(status(num_speculative_tokens=4, **settings), "http").startswith(shown)
