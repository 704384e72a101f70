"""Leases, epochs and capacity of held sequences."""

from __future__ import annotations

import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import NotFoundError, ResourceExhaustedError, StaleEpochError
from paceline.core.messages import CloseSequence, OpenSequence
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.scheduling.sequences import HeldSequences
from paceline.engine.state.paged import PagedStates
from paceline.kv import BlockPool

PARAMS = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 2)


class Case:
    def __init__(self, max_sequences: int = 10) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(8, 4)
        self.it: HeldSequences[str] = HeldSequences(
            PagedStates(self.pool, prefix_cache=False), max_sequences, self.clock, 10.0
        )

    def open(self, name: str, epoch: int = 1, *tokens: int) -> None:
        self.it.open(OpenSequence(name, epoch, tokens or (1, 2), PARAMS))

    def fill(self, name: str, n: int = 4) -> None:
        table = self.it.get(name).table
        table.reserve(n)
        table.commit(n)


def test_a_lease_ends_when_not_renewed() -> None:
    case = Case()
    case.open("a")
    case.clock.advance(6)
    case.open("b")
    case.it.get("a")
    case.clock.advance(6)
    assert case.it.expired() == []
    case.clock.advance(4)
    assert case.it.expired() == ["b", "a"]
    assert "a" in case.it, "the caller decides what to drop"


def test_finding_a_sequence_does_not_renew_its_lease() -> None:
    case = Case()
    case.open("a")
    case.clock.advance(9)
    assert case.it.find("a") is not None
    assert case.it.find("b") is None
    case.clock.advance(1)
    assert case.it.expired() == ["a"]


def test_reopening_in_the_same_epoch_changes_nothing() -> None:
    case = Case()
    case.open("a", 1, 1, 2, 3)
    case.fill("a")
    held = case.it.get("a")
    case.open("a", 1, 9)
    assert case.it.get("a") is held
    assert held.session.tokens == [1, 2, 3]


def test_a_newer_epoch_replaces_sequence_and_blocks() -> None:
    case = Case()
    case.open("a")
    case.fill("a")
    case.open("a", 2, 5, 6)
    held = case.it.get("a")
    assert (held.session.epoch, held.session.tokens, held.table.length) == (2, [5, 6], 0)
    assert case.pool.used_blocks == 0


def test_an_older_epoch_is_refused() -> None:
    case = Case()
    case.open("a", 2)
    with pytest.raises(StaleEpochError):
        case.open("a", 1)
    assert case.it.close(CloseSequence("a", 1)) is False
    assert case.it.get("a").session.epoch == 2
    assert case.it.close(CloseSequence("a", 2)) is True
    assert case.it.close(CloseSequence("a", 2)) is False


def test_sequences_are_bounded() -> None:
    case = Case(max_sequences=2)
    case.open("a")
    case.open("b")
    with pytest.raises(ResourceExhaustedError, match="2 sequences"):
        case.open("c")
    case.open("a", 2)
    case.it.drop("b")
    case.open("c")
    assert sorted(held.session.sequence_id for held in case.it) == ["a", "c"]


def test_dropping_frees_blocks_and_ends_the_lease() -> None:
    case = Case()
    case.open("a")
    case.fill("a", 9)
    assert case.pool.used_blocks == 3
    case.it.drop("a")
    case.it.drop("a")
    assert (case.pool.used_blocks, len(case.it)) == (0, 0)
    case.clock.advance(100)
    assert case.it.expired() == []
    with pytest.raises(NotFoundError):
        case.it.get("a")


def test_cutting_to_the_ledger_keeps_session_and_table_equal() -> None:
    case = Case()
    case.open("a", 1, 1, 2, 3)
    held = case.it.get("a")
    case.fill("a", 5)
    held.session.cached = [1, 2, 9, 9, 9]
    held.cut_to_ledger()
    assert (held.session.cached, held.table.length) == ([1, 2], 2)
