"""`Drafter`: keeps what it needs of each sequence, and scores tokens for the draft.

Everything above it (rounds, sampling, grammars, lookahead, the wire) knows drafters by this protocol alone.
Everything below it (models, block tables, prefix cache, preemption, recorded passes) is the drafter's own.
A `HeldSequence` joins both sides: its session is the ledger, and its state is what the drafter made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.messages import DraftProposal
from paceline.engine.cancel import CancelToken
from paceline.engine.loading.build import Built
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from paceline.engine.scheduling.passes import Job, PassResult
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.telemetry.worker import Passes


@dataclass(frozen=True, slots=True)
class DraftSkills:
    """What a drafter can do besides single steps, and what it promises of them."""

    row_invariant: bool
    """A row's scores are bitwise the same whatever other rows are computed with it."""
    chains: ChainSkills | None = None
    """How it draws several tokens of a sequence in one call; None where it does not."""


class BranchState(Protocol):
    """What a drafter keeps of one branch: the state after some tokens that may follow a sequence."""

    @property
    def length(self) -> int:
        """Tokens it has taken in, those of the sequence included."""

    def cut(self, length: int) -> BranchState:
        """A new branch after the first `length` tokens of this one, at least those of the sequence."""


class BranchRegion(Protocol):
    """All branches of one sequence. The sequence itself must not change while they are in use."""

    def branch(self, kept: int) -> BranchState:
        """A branch after the sequence's first `kept` tokens."""

    def free(self) -> None:
        """Give back what the branches take; none of them may be used any more."""


class Drafter(Protocol):
    """Scores the next token after each sequence or branch. One thread uses it.

    `sequences.states` makes the states of sequences (paceline/engine/state). `HeldSequence.cut_to` rolls one
    back together with the record of the tokens it stands for. Branches are passed back as they were given, so
    their types are `Any`.
    """

    sequences: HeldSequences[DraftProposal]
    """The sequences that are held, with their sessions, leases and states."""

    @property
    def skills(self) -> DraftSkills:
        """May grow while it serves: recorded passes, for example."""

    @property
    def free_entries(self) -> int:
        """Tokens that branches could take in now."""

    def step(
        self,
        feeds: Sequence[Job],
        *,
        max_rows: int,
        max_prefill_rows: int | None,
        free_branches: Callable[[], bool],
        passes: Passes,
    ) -> PassResult:
        """Take in tokens of each feed, in order of arrival; score the last rows of those that are complete.

        Args:
            feeds: each is taken up where its last step ended, and records its time.
            max_rows: tokens of all feeds together. A feed may take several steps.
            max_prefill_rows: those whose rows nobody wants, where other feeds wait for the pass; None for
                no such bound.
            free_branches: gives back every branch's room, called where there is too little for the feeds;
                False when there was none.
            passes: told of the pass.

        Returns:
            The complete feeds with logits [sum of their rows, vocabulary], and the feeds that cannot go on
            with their errors. An error of one feed leaves the others alone.
        """

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """Draw several tokens after each state or branch; only with `skills.chains`.

        A chain is shorter than asked when it was cancelled or met a row that is no distribution, and empty
        where it must be drawn step by step. Raises ResourceExhaustedError; the states are unchanged then.
        """

    def fork(self, held: HeldSequence[DraftProposal], max_entries: int) -> BranchRegion:
        """Room for branches that take in up to `max_entries` tokens together.

        Raises ResourceExhaustedError.
        """

    def step_branches(self, branches: Sequence[Any], token_ids: Sequence[int]) -> torch.Tensor:
        """Feed each branch one token; float32 logits [len(branches), vocabulary].

        Branches of one sequence stand together. Raises ResourceExhaustedError.
        """

    def extend_branch(self, branch: Any, source: Any, count: int) -> None:
        """Let a branch take in the `count` tokens that another branch has behind as many tokens as it has.

        Both follow the same tokens. Raises ResourceExhaustedError; the branch is unchanged then.
        """

    def adopt(self, held: HeldSequence[DraftProposal], branch: Any) -> None:
        """Make the branch's state the sequence's. Branches must only be copied from after that.

        Raises ResourceExhaustedError; the sequence then ends where the branch began.
        """


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """What the registry has for a name."""

    load: Callable[[DraftConfig], Built]
    """What must be on this machine before it drafts: `build` for a model with its weights and cache,
    `build_vocabulary` for a tokenizer alone."""
    make: Callable[[Built, DraftConfig, Clock], Drafter]
    reads_corpus: bool = False
    """It counts the text of `--corpus`."""
