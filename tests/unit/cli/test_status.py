"""The table of `paceline status` shows what the server reported, verbatim."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.cli.commands.generate import _summary, status_table
from paceline.client import CacheInfo, CoordinatorStatus, ServerStatus, WorkerInfo, WorkerState, WorkerStatus
from paceline.core.types import AcceptanceMode

COORDINATOR = CoordinatorStatus(
    address="[fe80::1%eth0]:50151",
    process_id=7,
    running=0,
    waiting=0,
    num_speculative_tokens=3,
    max_num_speculative_tokens=8,
    acceptance_mode=AcceptanceMode.COUPLED,
    prompt_lookup=True,
    finished_requests=0,
    failed_requests=0,
    http_address="",
    num_preemptions=0,
)
INFO = WorkerInfo(
    protocol_version=1,
    role="draft",
    model="models/[old]/draft",
    process_id=9,
    instance_id="x",
    vocabulary_size=257,
    tokenizer_fingerprint="x",
    eos_token_ids=(0,),
    max_model_len=100,
    max_speculative_tokens=16,
    cache=CacheInfo(16, 64, 60, 1, 0, 0, 2, 0),
    device="cpu",
    dtype="float32",
    num_parameters=1_000_000,
    local_socket="",
    weight_bytes=4_000_000,
)


def shown(*workers: WorkerStatus) -> str:
    console = Console(file=io.StringIO(), width=400, highlight=False)
    console.print(status_table(ServerStatus(COORDINATOR, workers)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "reason",
    [
        "eos_token_ids of the draft are [5, 6], of the target [7]",
        "the file models/[bold]/draft cannot be read",
        "expected [/end], got [a]",
    ],
)
def test_reasons_and_addresses_are_printed_verbatim(reason: str) -> None:
    table = shown(
        WorkerStatus("[fd00::2]:50051", "target", WorkerState.REFUSED, reason, None),
        WorkerStatus("[fd00::3]:50052", "draft", WorkerState.LOST, reason, INFO),
    )
    coordinator, target, draft = table.splitlines()[1:]
    assert COORDINATOR.address in coordinator
    assert "[fd00::2]:50051" in target
    assert f"refused ({reason})" in target
    assert "[fd00::3]:50052" in draft
    assert f"lost ({reason})" in draft
    assert f"{INFO.model}, 1.0M, float32, cpu" in draft
    assert "64 of 1,024" in draft
    assert "none yet" in draft


def test_counts_are_named_as_completions() -> None:
    """A request with `n` of 3 counts as three."""
    told = _summary(ServerStatus(replace(COORDINATOR, finished_requests=3, failed_requests=1), ()), "http")
    assert "3 finished, 1 failed completions (each of n)" in told


def test_coordinator_warnings_are_shown() -> None:
    warned = replace(COORDINATOR, warnings=("a draft is short", "a draft is idle"))
    *_, first, second = _summary(ServerStatus(warned, ()), "http").splitlines()
    assert (first, second) == ("warning: a draft is short", "warning: a draft is idle")
