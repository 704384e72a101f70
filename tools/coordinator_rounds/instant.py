"""`paceline` with workers that answer at once: `python -m tools.coordinator_rounds.instant COMMAND …`.

A draft proposes the tokens of one endless text, and a target accepts all of them and adds the next one. The
rest is a worker's own: process, ports, frames, engine thread. Only the model's tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import draft_worker.main
import target_worker.main
from paceline.__main__ import main
from paceline.core.config import WorkerConfig
from paceline.core.messages import (
    CloseSequence,
    DraftCommand,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    TargetCommand,
    VerifyRound,
)
from paceline.core.types import Proposal, Verdict
from paceline.engine.loading.build import Built, build_vocabulary
from paceline.telemetry.worker import WorkerObserver

FIRST, COUNT = 300, 512
"""The text's tokens, by position: ordinary ones of the embedded pair's vocabulary."""


def text(start: int, count: int) -> tuple[int, ...]:
    """The tokens at `count` positions from `start` on."""
    return tuple(FIRST + position % COUNT for position in range(start, start + count))


class InstantEngine:
    """An engine without passes. `handle` is a role's."""

    grammars = None
    has_work = False
    max_tree_nodes = 0

    def __init__(self, _built: Built, _config: WorkerConfig, observer: WorkerObserver) -> None:
        self.observer = observer
        self.sequences: dict[str, int] = {}
        """The sequences held, with their epochs."""

    def handle(self, command: Any, arrived: float) -> list[Any]:
        """The answer to a command."""
        match command:
            case OpenSequence():
                self.sequences[command.sequence_id] = command.epoch
            case CloseSequence():
                self.sequences.pop(command.sequence_id, None)
        return []

    def step(self) -> list[Any]:
        """There is never a pass."""
        return []

    def batching_delay(self) -> float:
        """Nothing is waited for."""
        return 0.0

    def reset_cancel(self) -> None:
        """Nothing is cancelled."""

    def notify(self, commands: Sequence[Any | SequenceFailed]) -> None:
        """Nothing is in progress."""

    def holds(self, sequence_id: str) -> bool:
        """True until it is closed."""
        return sequence_id in self.sequences

    def drop(self, sequence_id: str) -> None:
        """Its coordinator is gone."""
        self.sequences.pop(sequence_id, None)

    def expire(self) -> None:
        """There are no leases."""


class InstantTarget(InstantEngine):
    """Accepts everything. It does not begin rounds by itself."""

    def handle(self, command: TargetCommand, arrived: float) -> list[Any]:
        """The verdict of a round."""
        if not isinstance(command, VerifyRound):
            return super().handle(command, arrived)
        accepted = command.proposal.token_ids
        computed = command.base_length + len(accepted)
        verdict = Verdict(len(accepted), (*accepted, *text(computed, 1)), computed)
        return [RoundVerdict(command.sequence_id, command.epoch, command.round, verdict)]


class InstantDraft(InstantEngine):
    """Proposes as many tokens as it is asked for. It does not draft ahead."""

    def handle(self, command: DraftCommand, arrived: float) -> list[Any]:
        """The proposal of a round."""
        if not isinstance(command, DraftRound):
            return super().handle(command, arrived)
        base, count = command.base_length, command.num_draft_tokens
        where = command.sequence_id, command.epoch, command.round, base
        return [DraftProposal(*where, Proposal(text(base, count)), base + count - 1)]


if __name__ == "__main__":
    target_worker.main.ROLE = replace(
        target_worker.main.ROLE, load=build_vocabulary, make_engine=InstantTarget
    )
    draft_worker.main.ROLE = replace(draft_worker.main.ROLE, load=build_vocabulary, make_engine=InstantDraft)
    main()
