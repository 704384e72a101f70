"""The sequences of one worker: sessions with their states and leases. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import NotFoundError, ResourceExhaustedError, StaleEpochError
from paceline.core.messages import CloseSequence, OpenSequence
from paceline.engine.scheduling.session import Session
from paceline.engine.state.interface import SequenceState, SequenceStates
from paceline.engine.state.paged import PagedState
from paceline.engine.tree_places import TreePlaces
from paceline.grammar import GrammarState
from paceline.kv import BlockTable, Leases, PrefixIndex

Answer = TypeVar("Answer")

RETRY_SECONDS = 1.0
"""Retry hint when other sequences hold the room: they will release it."""


@dataclass(slots=True)
class HeldSequence(Generic[Answer]):
    """One sequence on this worker."""

    session: Session[Answer]
    state: SequenceState
    grammar: GrammarState | None = None
    """State of the text in its `structured_outputs`; derived from the session's tokens on demand."""
    age: int = 0
    """Older sequences have smaller numbers; all numbers differ."""
    table: BlockTable = field(init=False, repr=False)
    """The table of a paged state, for the model's passes. Other states have none."""

    def __post_init__(self) -> None:
        if isinstance(self.state, PagedState):
            self.table = self.state.table

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens in its state."""
        return self.state.length

    def cut_to_ledger(self) -> None:
        """Drop cache entries that disagree with the ledger."""
        self.cut_to(self.session.agreed_length())

    def cut_to(self, length: int) -> None:
        """Drop cache entries at `length` and beyond, and any reservation."""
        del self.session.cached[self.state.truncate_to(length) :]

    def fed(self, token_ids: Sequence[int]) -> None:
        """Record that the latest pass wrote entries for `token_ids`.

        Blocks that are full of the ledger's tokens are final; proposed tokens are not in the ledger.
        """
        session = self.session
        session.cached.extend(token_ids)
        assert self.state.length == len(session.cached)
        self.state.publish(session.tokens)

    def moves_to(self, base: int, places: TreePlaces, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which entries to copy so that the table holds an accepted path of a tree: slots from and to.

        To be asked before anything cuts the reservation of the pass that fed the tree.

        Args:
            base: the position of the tree's first nodes.
            places: of its nodes.
            path: the accepted nodes.
        """
        kept, behind = places.moves(path)
        if not behind:
            return [], []
        table = self.table
        slots = table.slots(table.length, table.length + table.reserved)
        return [slots[place] for place in behind], table.slots(base + kept, base + len(path))

    def found_sound(self) -> None:
        """The row after the last entry is a distribution. It depends on all entries, so all are finite."""
        self.state.mark_finite()

    def found_broken(self) -> None:
        """A row is not a distribution: drop the entries since the last sound row, and unpublish them.

        A pass may corrupt entries of tokens before the one on which a model breaks: attention multiplies
        masked rows by 0, and 0 times NaN is NaN.
        """
        length = min(self.state.finite_length, self.session.agreed_length())
        self.state.withdraw(length)
        self.cut_to(length)

    def reuse(self, most: int) -> int:
        """Reuse entries of the ledger's first `most` tokens from the prefix cache; returns their number."""
        tokens = self.session.tokens[:most]
        found = self.state.lookup(tokens)
        self.session.cached.extend(tokens[self.state.length - found : self.state.length])
        return found


@dataclass(slots=True)
class HeldSequences(Generic[Answer]):
    """Sequences by id, each with a lease that its rounds renew."""

    states: SequenceStates
    max_sequences: int
    clock: Clock
    lease_seconds: float
    num_preemptions: int = 0
    """Number of times that a sequence lost its blocks to an older one."""
    _last_pass: tuple[float, float, int] = (0.0, 0.0, 0)
    """Start, end and prompt rows of the last pass."""
    _opened: int = 0
    _held: dict[str, HeldSequence[Answer]] = field(default_factory=dict)
    _leases: Leases[str] = field(init=False)

    def __post_init__(self) -> None:
        self._leases = Leases(self.clock, self.lease_seconds)

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """Blocks of ended sequences, for later ones with the same beginning; None if none are kept."""
        return self.states.prefix_index

    def passed(self, begun: float, ended: float, prefill_rows: int) -> None:
        """A pass has ended or been submitted; `prefill_rows` of its rows had logits that were not wanted."""
        self._last_pass = begun, ended, prefill_rows

    def looked_at(self, ended: float) -> None:
        """The logits of the last pass have been read, so the device has finished it.

        `passed` may have been called before the device computed the pass.
        """
        begun, _, rows = self._last_pass
        self._last_pass = begun, ended, rows

    def prefill_rows_since(self, arrived: float) -> int:
        """Prefill rows of the last pass, in proportion to the part of it that was left at `arrived`."""
        begun, ended, rows = self._last_pass
        waited = ended - max(arrived, begun)
        return round(rows * waited / (ended - begun)) if waited > 0 else 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence[Answer]]:
        return iter(self._held.values())

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._held

    def find(self, sequence_id: str) -> HeldSequence[Answer] | None:
        """The sequence if it is held; its lease is not renewed."""
        return self._held.get(sequence_id)

    def open(self, command: OpenSequence, grammar: GrammarState | None = None) -> None:
        """Open a sequence, replacing one of an older epoch; the same epoch again changes nothing.

        A replacement keeps the age. Raises StaleEpochError, ResourceExhaustedError.
        """
        old = self._held.get(command.sequence_id)
        if old is not None:
            if command.epoch < old.session.epoch:
                raise StaleEpochError(f"epoch {command.epoch} is older than {old.session.epoch}")
            if command.epoch == old.session.epoch:
                return
            self.drop(command.sequence_id)
        if len(self._held) >= self.max_sequences:
            message = f"this worker holds {self.max_sequences} sequences already"
            raise ResourceExhaustedError(message, RETRY_SECONDS)
        session: Session[Answer] = Session(
            command.sequence_id, command.epoch, command.params, list(command.token_ids)
        )
        self._opened += 1
        state, age = self.states.new(command.params.cache_salt), self._opened if old is None else old.age
        self._held[command.sequence_id] = HeldSequence(session, state, grammar, age)
        self._leases.renew(command.sequence_id)

    def get(self, sequence_id: str) -> HeldSequence[Answer]:
        """The sequence, with its lease renewed. Raises NotFoundError."""
        held = self._held.get(sequence_id)
        if held is None:
            raise NotFoundError("no such sequence: never opened, or its lease has expired")
        self._leases.renew(sequence_id)
        return held

    def close(self, command: CloseSequence) -> bool:
        """Drop the sequence unless a newer epoch owns it. Returns True if it was dropped."""
        held = self._held.get(command.sequence_id)
        if held is None or held.session.epoch > command.epoch:
            return False
        self.drop(command.sequence_id)
        return True

    def drop(self, sequence_id: str) -> None:
        """Drop a sequence, if held, and free its blocks."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            held.state.free()
            self._leases.end(sequence_id)

    def expired(self) -> list[str]:
        """Sequences whose lease has expired; the caller drops them."""
        return self._leases.expired()
