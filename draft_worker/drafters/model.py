"""A drafter that is a language model on a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from draft_worker.drafters.interface import DraftSkills
from draft_worker.drafters.runner import DraftRunner
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.messages import DraftProposal
from paceline.decoding.coupled import ranked
from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from paceline.decoding.support import draw_sparse
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import BranchInput, SequenceInput
from paceline.engine.loading.build import Built, build
from paceline.engine.multi_step import Chain, ChainInput
from paceline.engine.scheduling.passes import Job, PassResult, run_pass
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.kv import Branch, Branching
from paceline.telemetry.worker import Passes

_RANKED: Final = 9
"""Tokens that are ranked to draft ahead for several outcomes."""


class ModelDrafter:
    """One entry of the cache for each token taken in: sequences have block tables, branches share a region.

    Prompts are prefilled in chunks, from cached prefixes where there are any; a sequence may lose its blocks
    to an older one, and is then fed from the beginning again.
    """

    def __init__(self, runner: DraftRunner, config: DraftConfig, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self.sequences: HeldSequences[DraftProposal] = HeldSequences(
            runner.new_states(prefix_cache=config.prefix_cache),
            config.max_sequences,
            clock,
            config.lease_seconds,
        )
        self._pool = runner.new_table().pool

    @classmethod
    def of(cls, built: Built, config: DraftConfig, clock: Clock) -> ModelDrafter:
        """The drafter of a model that was just loaded."""
        assert built.runner is not None
        warm_up(built.runner)
        return cls(built.runner, config, clock)

    @property
    def skills(self) -> DraftSkills:
        """Those of the model's passes."""
        return DraftSkills(self._runner.row_invariant, self._runner.chain_skills)

    @property
    def free_entries(self) -> int:
        """Of the blocks that nobody holds."""
        return self._pool.free_blocks * self._pool.block_size

    def step(
        self,
        feeds: Sequence[Job],
        *,
        max_rows: int,
        max_prefill_rows: int | None,
        free_branches: Callable[[], bool],
        passes: Passes,
    ) -> PassResult:
        """One pass of the model over chunks of the feeds; see `Drafter`."""
        how = max_rows, self._clock, self.sequences, free_branches, max_prefill_rows, passes
        return run_pass(feeds, self._runner, *how)

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """Chains of the model's compiled or recorded passes; see `Drafter`."""
        return self._runner.forward_chains(chains, cancel)

    def fork(self, held: HeldSequence[DraftProposal], max_entries: int) -> Branching:
        """A region of blocks for the branches of a sequence. Raises ResourceExhaustedError."""
        return Branching(held.table, max_entries)

    def step_branches(self, branches: Sequence[Branch], token_ids: Sequence[int]) -> torch.Tensor:
        """One pass over rows of trees; see `Drafter`."""
        return self._runner.forward_branches(list(map(BranchInput, branches, token_ids)))

    def extend_branch(self, branch: Branch, source: Branch, count: int) -> None:
        """Copy entries from slot to slot; see `Drafter`."""
        first = branch.length - source.kept
        branch.reserve(count)
        taken = source.own_slots()[first : first + count]
        self._runner.copy_slots(taken, branch.own_slots(count)[len(branch.own) :])
        branch.commit(count)

    def adopt(self, held: HeldSequence[DraftProposal], branch: Branch) -> None:
        """Copy the branch's entries behind those of the sequence that it shares; see `Drafter`."""
        self._runner.adopt(branch)


def warm_up(runner: DraftRunner) -> None:
    """Compile what draws before the first request; rounds and lookahead use the same code."""
    table = runner.new_table()
    logits = runner.forward([SequenceInput(table, [0], 1)])
    draw_sparse(logits, uniforms([0], [0], Purpose.DRAFT_DRAW, 1)[0], 1.0, 1)
    ranked(logits, [CoupledNoise(0, 0)], 1)
    if runner.chain_skills is not None:
        runner.forward_chains([ChainInput(table, [0], 1)])
    table.free()


def load(config: DraftConfig) -> Built:
    """The model with a cache of what drawing leaves. Raises InvalidArgumentError naming the field."""

    def draw_largest(logits: torch.Tensor) -> None:
        """Draw from all rows in both ways, from scores that are a copy of the logits."""
        scores, rows = logits / 2, len(logits)
        streams = [0] * rows
        u = uniforms(streams, streams, Purpose.DRAFT_DRAW, 1)[:, 0]
        draw_sparse(scores, u, config.support_mass, config.support_bound)
        ranked(scores, [CoupledNoise(0, 0)] * rows, _RANKED)

    return build(config, draw_largest, chains=True)
