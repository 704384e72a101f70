"""Draws the proposals of rounds: whole chains where the drafter can, else step by step; trees level by level.

Each step is one step of the drafter over all rounds, whatever step each one is at. Where a sub-drafter has a
guess, one step may draw several tokens (sampling/guesses.py). Elsewhere, if no logits need Python between two
tokens, the drafter draws all steps after the first by itself (sampling/chains.py). A tree begins with the row
after its ledger, and then grows together with all others (trees/).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draft_worker.drafters.interface import Drafter
from draft_worker.sampling.chains import can_chain, chain_of, drawn_by
from draft_worker.sampling.guesses import Guesses, draw_guessed
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.sampler import TokenSampler
from draft_worker.trees.tree import DraftTree
from draft_worker.trees.trees import Trees
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.errors import InternalError, PacelineError, ResourceExhaustedError
from paceline.core.messages import DraftProposal, DraftRound
from paceline.engine.scheduling.passes import Job, together_or_alone
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.telemetry.worker import Passes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftInProgress:
    """A round whose proposal is being drawn."""

    command: DraftRound
    draft: PartialDraft
    job: Job
    """Its outstanding feed."""
    guess: Sequence[int] = ()
    """The last tokens of the feed, guessed to be drawn next."""
    wants_tree: bool = False
    tree: DraftTree | None = None
    """Once the ledger is fed."""


Ended = tuple[DraftInProgress, PacelineError | None]
"""A round whose proposal is drawn, or that cannot go on."""


@dataclass(slots=True)
class Drawing:
    """Draws for the rounds of a worker."""

    drafter: Drafter
    config: DraftConfig
    sampler: TokenSampler
    trees: Trees
    guesses: Guesses
    eos_token_ids: Sequence[int]
    passes: Passes
    clock: Clock
    free_branches: Callable[[], bool]
    """Frees the room of all branches and trees."""
    room_ahead: Callable[[DraftRound], int]
    """Entries wanted beside a round's tree, to draft ahead of its verdict."""

    def advance(self, rounds: Sequence[DraftInProgress]) -> list[Ended]:
        """Whole chains, then one step of the others, then one level of every tree; the rounds that end."""
        ended: list[Ended] = []
        for draw in (self._draw_chains, self._draw_step, self._grow_trees):
            over = {id(r) for r, _ in ended}
            ended += draw([r for r in rounds if id(r) not in over])
        return ended

    def feed(self, r: DraftInProgress, tokens: Sequence[int]) -> None:
        """Feed a round's next tokens, the newest last, and what the sub-drafter guesses behind them."""
        # A sub-drafter guesses one path.
        r.guess = () if r.wants_tree else self.guesses.after(r.command.sequence_id, r.draft)
        r.job.feed_next([*tokens, *r.guess], rows=1 + len(r.guess))

    def _draw_chains(self, rounds: Sequence[DraftInProgress]) -> list[Ended]:
        """Draw the rounds that the drafter can draw by itself; all others, and failed ones, go by steps.

        One with a guess takes a step, which may draw as many tokens as a chain in the time of one.
        """
        skills = self.drafter.skills.chains
        if skills is None:
            return []
        config, others = self.config, self.sampler.num_others
        chained: list[DraftInProgress] = []
        rows_left = config.max_batch_tokens
        for r in rounds:
            short = r.job.remaining <= min(skills.max_feed, rows_left) and not r.job.begins
            stepwise = r.wants_tree or r.guess
            if short and not stepwise and can_chain(r.draft, skills, self.eos_token_ids):
                chained.append(r)
                rows_left -= r.job.remaining
        if not chained:
            return []
        chains = [
            chain_of(r.draft, r.job.held.table, r.job.feed[r.job.offset :], config, others) for r in chained
        ]
        begun = self.clock()
        try:
            drawn = self.drafter.draw_chains(chains)
        except ResourceExhaustedError:
            return []
        except Exception:
            log.exception("drawing %d chains failed; going on token by token", len(chains))
            return []
        spent = self.clock() - begun
        rows = sum(chain.entries(found) for chain, found in zip(chains, drawn, strict=True))
        self.passes.ran(rows, len(chains), spent)
        ended: list[Ended] = []
        for r, chain, found in zip(chained, chains, drawn, strict=True):
            r.job.ran(begun, spent, rows, len(chains))
            if not found.token_ids:
                continue
            r.job.held.fed([*chain.token_ids, *found.token_ids[:-1]])
            r.job.held.found_sound()
            r.draft.drawn.extend(drawn_by(found))
            if r.draft.complete:
                ended.append((r, None))
            else:
                self.feed(r, [r.draft.newest])
        return ended

    def _draw_step(self, rounds: Sequence[DraftInProgress]) -> list[Ended]:
        """One step of the drafter over the rounds in progress, and the tokens drawn from its scores."""
        by_id = {r.job.sequence_id: r for r in rounds if r.tree is None}
        if not by_id:
            return []
        result = self.drafter.step(
            [r.job for r in by_id.values()],
            max_rows=self.config.max_batch_tokens,
            max_prefill_rows=self.config.max_mixed_prefill_tokens or None,
            free_branches=self.free_branches,
            passes=self.passes,
        )
        ended: list[Ended] = [(by_id[job.sequence_id], error) for job, error in result.failed]
        if not result.finished:
            return ended
        assert result.logits is not None
        fed = [by_id[job.sequence_id] for job in result.finished]
        planted = [r for r in fed if r.wants_tree and self._plant(r)]
        if not planted:
            return [*ended, *self._draw(fed, result.logits)]
        parts = list(zip(fed, torch.split(result.logits, [r.job.rows for r in fed]), strict=True))
        for draw, some in (
            (self._draw, [part for part in parts if part[0].tree is None]),
            (self._root, [part for part in parts if part[0].tree is not None]),
        ):
            if some:
                ended += draw([r for r, _ in some], torch.cat([rows for _, rows in some]))
        return ended

    def _draw(self, rounds: Sequence[DraftInProgress], logits: torch.Tensor) -> list[Ended]:
        """The next tokens of chains, from the rows that were fed last."""
        begun = self.clock()
        drawn = together_or_alone(
            rounds,
            logits,
            [r.job.rows for r in rounds],
            lambda some, rows: draw_guessed(self.sampler, [(r.draft, r.guess) for r in some], rows),
            "drawing",
        )
        spent = self.clock() - begun
        ended: list[Ended] = []
        for r, tokens in zip(rounds, drawn, strict=True):
            r.job.compute += spent
            if isinstance(tokens, PacelineError):
                ended.append((r, tokens))
                continue
            r.draft.drawn.extend(filter(None, tokens))
            cut_to_draft(r)
            if tokens[-1] is None:
                ended.append((r, _found_broken(r.job.held)))
                continue
            r.job.held.found_sound()
            if r.draft.complete:
                ended.append((r, None))
            else:
                self.feed(r, [r.draft.newest])
        return ended

    def _plant(self, r: DraftInProgress) -> bool:
        """Begin a round's tree; False if there is no room for one, so that a chain is drawn.

        That depends on nothing that is drawn in the round.
        """
        more = self.room_ahead(r.command)
        r.tree = self.trees.begin(r.job.held, r.draft, r.command.shape, more)
        r.wants_tree = r.tree is not None
        return r.wants_tree

    def _root(self, rounds: Sequence[DraftInProgress], logits: torch.Tensor) -> list[Ended]:
        """The first nodes of trees, from the rows after their ledgers."""
        width = max(r.command.shape.width for r in rounds)
        begun = self.clock()
        found = together_or_alone(
            rounds,
            logits,
            [1] * len(rounds),
            lambda some, rows: self.sampler.rows([r.draft for r in some], rows, width),
            "drawing",
        )
        spent = self.clock() - begun
        ended: list[Ended] = []
        for r, row in zip(rounds, found, strict=True):
            r.job.compute += spent
            if row is None or isinstance(row, PacelineError):
                ended.append((r, _found_broken(r.job.held) if row is None else row))
                continue
            r.job.held.found_sound()
            assert r.tree is not None
            r.tree.growth.grow([row])
        return ended

    def _grow_trees(self, rounds: Sequence[DraftInProgress]) -> list[Ended]:
        """One level of every tree, in one pass."""
        planted = [(r, r.tree) for r in rounds if r.tree is not None]
        growing = [tree for _, tree in planted if not tree.complete]
        if growing:
            begun = self.clock()
            rows = self.trees.grow(growing)
            spent = self.clock() - begun
            self.passes.ran(rows, len(growing), spent)
            for r, tree in planted:
                if tree in growing:
                    r.job.ran(begun, spent, rows, len(growing))
        return [(r, None) for r, tree in planted if tree.complete]


def cut_to_draft(r: DraftInProgress) -> None:
    """Drop entries that wrong guesses left. The draft's newest token has none."""
    held = r.job.held
    held.cut_to(min(held.num_computed_tokens, r.command.base_length + len(r.draft.drawn) - 1))


def _found_broken(held: HeldSequence[DraftProposal]) -> InternalError:
    """The error of a round whose last row is no distribution."""
    held.found_broken()
    return InternalError("the draft model's logits are not numbers")
