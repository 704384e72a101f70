"""Drafts ahead while verdicts are awaited: schedules, adopts and frees the branches of all sequences."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from draft_worker.drafters.interface import BranchRegion, Drafter
from draft_worker.lookahead.branches import DraftBranch, SequenceBranches
from draft_worker.lookahead.fanout import WORTH_A_ROW, WORTH_DRAFTING, FanOut
from draft_worker.lookahead.tree_outcomes import TreeOutcomes
from draft_worker.sampling.chains import can_chain, chain_of, drawn_by
from draft_worker.sampling.draw import Drawn, NoiseTape
from draft_worker.sampling.growth import BestNodes
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.sampler import TokenSampler
from draft_worker.trees.tree import DraftTree
from draft_worker.trees.trees import Trees
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.errors import ResourceExhaustedError
from paceline.core.messages import DraftEvent, DraftProposal, DraftRound
from paceline.core.types import AcceptanceMode, Outcome
from paceline.engine.cancel import CancelToken
from paceline.engine.scheduling.passes import own_error
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.telemetry.worker import Passes

log = logging.getLogger(__name__)

Work = tuple[SequenceBranches, DraftBranch]


class AnsweredRound(NamedTuple):
    """A round whose proposal is drawn."""

    command: DraftRound
    held: HeldSequence[DraftProposal]
    draft: PartialDraft


class Lookahead:
    """The branches of all sequences of a worker."""

    def __init__(
        self,
        drafter: Drafter,
        config: DraftConfig,
        sampler: TokenSampler,
        passes: Passes,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        clock: Clock,
        trees: Trees,
    ) -> None:
        self._drafter = drafter
        self._config = config
        self._sampler = sampler
        self._passes = passes
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._by_sequence: dict[str, SequenceBranches] = {}
        self._adopted: dict[str, Work] = {}
        """Adopted branches with a suffix. Each stays until the round that uses it has branches."""
        self._trees = trees
        self._outcomes: dict[str, TreeOutcomes] = {}
        """Of the rounds with a tree."""
        self._answered: dict[str, AnsweredRound] = {}
        """Rounds without branches yet."""
        self.has_unsent = False
        """True if branches grew and the coordinator has not been sent the tokens."""
        self._fan_outs: dict[tuple[AcceptanceMode, bool], FanOut] = {}
        self._cancel = CancelToken()
        self.rounds = 0
        """Number of rounds that followed a verdict for which branches could have been drafted."""
        self.hits = 0
        """Number of those rounds that a branch foresaw, complete or not."""

    @property
    def has_work(self) -> bool:
        """True while there are tokens to draft or to send."""
        width = self._branches_each()
        wants_passes = any(branches.wants_passes for branches in self._by_sequence.values()) or any(
            outcomes.wants_passes(width) for outcomes in self._outcomes.values()
        )
        return bool(self._answered) or self.has_unsent or wants_passes

    @property
    def regions(self) -> list[BranchRegion]:
        """All regions that branches hold."""
        return [branches.region for branches in self._with_regions]

    @property
    def _with_regions(self) -> list[SequenceBranches]:
        return [*self._by_sequence.values(), *(branches for branches, _ in self._adopted.values())]

    def reset_cancel(self) -> None:
        """Call before waiting commands are processed."""
        self._cancel.reset()

    def interrupt(self) -> None:
        """A command waits: chains in progress end with their step. May be called from any thread."""
        self._cancel.cancel()

    def begin(self, command: DraftRound, held: HeldSequence[DraftProposal], draft: PartialDraft) -> None:
        """Look ahead of a round's verdict, if time and length permit.

        Branches begin with the next step, after the proposal was sent.
        """
        # The longest branch and one more token must fit into the model's length.
        base, k, depth = command.base_length, draft.k, command.num_lookahead_tokens or draft.k
        if self._branches_each() and base + k + depth + 1 <= self._max_model_len:
            self._answered[command.sequence_id] = AnsweredRound(command, held, draft)
        else:
            self._release_adopted(command.sequence_id)

    def begin_after_tree(self, command: DraftRound, tree: DraftTree) -> None:
        """The same after a tree, where the target decides: drawn trees are not drafted ahead."""
        base, k, depth = command.base_length, command.num_draft_tokens, _depth_ahead(command)
        drawn = tree.root.tape.uniforms is not None
        unwanted = drawn or command.no_lookahead
        if self._branches_each() and not unwanted and base + k + depth + 1 <= self._max_model_len:
            self._outcomes[command.sequence_id] = TreeOutcomes(command, tree, depth)

    def room_after_tree(self, command: DraftRound) -> int:
        """Entries that a round's tree may use for what is drafted ahead."""
        each, shape = 0 if command.no_lookahead else self._branches_each(), command.shape
        return each and shape.nodes + each * (1 + BestNodes(_depth_ahead(command), shape).max_fed)

    def adopt_tree(self, command: DraftRound, held: HeldSequence[DraftProposal]) -> DraftTree | None:
        """The tree that was drafted ahead for the verdict that led to this round, as the sequence's tree.

        None if there is none, or it cannot answer the round. The others are given up.
        """
        outcomes = self._outcomes.pop(command.sequence_id, None)
        self.discard(command.sequence_id)
        if outcomes is None:
            return None
        self.rounds += 1
        tree = outcomes.foreseen(command, held.session.tokens)
        if tree is None or not self._trees.replant(held, tree, self.room_after_tree(command)):
            return None
        self.hits += 1
        return tree

    def _open_branches(self) -> None:
        """Make room for the branches of answered rounds, as far as memory permits."""
        for sequence_id, (command, held, draft) in self._answered.items():
            k, depth = draft.k, command.num_lookahead_tokens or draft.k
            tape = NoiseTape.record(held.session.params, command.base_length, k + depth + 1)
            skills = self._drafter.skills.chains
            chained = can_chain(draft, skills, self._eos_token_ids)
            worth = WORTH_A_ROW if skills is not None and skills.row_by_row else WORTH_DRAFTING
            with _survived("making room for branches", sequence_id):
                of_round = held, command.round, draft.drawn, depth, tape
                limits = chained, self._max_model_len, worth
                branches = SequenceBranches(self._drafter, *of_round, self._fan_out(held), *limits)
                self._by_sequence[sequence_id] = branches
                if adopted := self._adopted.get(sequence_id):
                    before, branch = adopted
                    branches.adopt_suffix(before.suffix(branch), branch.state)
            self._release_adopted(sequence_id)
        self._answered.clear()

    def _release_adopted(self, sequence_id: str) -> None:
        """Release an adopted branch whose suffix is taken over or no longer useful."""
        adopted = self._adopted.pop(sequence_id, None)
        if adopted is not None:
            adopted[0].region.free()

    def _fan_out(self, held: HeldSequence[DraftProposal]) -> FanOut:
        """The statistics of requests with the same sampling and acceptance mode."""
        params = held.session.params
        return self._fan_outs.setdefault((params.mode, params.sampling.greedy), FanOut())

    def _branches_each(self) -> int:
        """Maximum branches of a sequence: with many sequences there is no idle time to fill."""
        num_sequences = len(self._drafter.sequences)
        if num_sequences > self._config.lookahead_sequences:
            return 0
        return self._config.lookahead_branches // max(1, num_sequences)

    def step(self) -> list[DraftEvent]:
        """Draw on branches, for no longer than an arriving round can wait."""
        self._open_branches()
        self.has_unsent = False
        if events := self._continuations():  # of adopted suffixes, and tokens drawn while a command arrived
            return events
        width = self._branches_each()
        events = self._grow_trees(width)
        work = [
            (branches, branch)
            for branches in self._by_sequence.values()
            for branch in branches.next_branches(width)
        ]
        del work[self._config.max_batch_tokens :]  # the rest waits for later steps
        if not work:
            return events
        try:
            left = self._draw_chains(work)
            if left:
                self._draw_step(left)
        except Exception:
            log.exception("drafting on %d branches failed; continuing without them", len(work))
            self.free()
            return events
        if self._cancel.cancelled:
            self.has_unsent = True  # the command may be the verdict, which makes these tokens useless
            return events
        return [*events, *self._continuations()]

    def _grow_trees(self, width: int) -> list[DraftEvent]:
        """One level of every tree that is drafted ahead, and leaves of those that are being verified."""
        some = [outcomes for outcomes in self._outcomes.values() if outcomes.wants_passes(width)]
        if not some:
            return []
        begun, feeds = self._clock(), [outcomes.feeds(width) for outcomes in some]
        every = [feed for of_one in feeds for feed in of_one]
        try:
            rows = iter(self._trees.rows_of(every, max(o.tree.growth.shape.width for o in some)))
        except Exception:
            log.exception("drafting ahead of %d trees failed; continuing without them", len(some))
            self._outcomes.clear()
            return []
        self._passes.ran(len(every), len(some), self._clock() - begun)
        for outcomes, of_one in zip(some, feeds, strict=True):
            outcomes.take(of_one, [next(rows) for _ in of_one])
        return [event for outcomes in some if (event := outcomes.continuations()) is not None]

    def _continuations(self) -> list[DraftEvent]:
        """The tokens that the coordinator does not have yet."""
        by_sequence = self._by_sequence.values()
        return [event for branches in by_sequence if (event := branches.continuations()) is not None]

    def _draw_chains(self, work: Sequence[Work]) -> list[Work]:
        """Draw chains to their end, or until a command waits; returns the work left for single steps."""
        chained = [(branches, branch) for branches, branch in work if branches.chained]
        if not chained:
            return list(work)
        others = self._sampler.num_others
        inputs = [
            chain_of(branch.current, branch.state, [branch.current.newest], self._config, others)
            for _, branch in chained
        ]
        begun = self._clock()
        chains = self._drafter.draw_chains(inputs, self._cancel)
        self._record_pass(sum(len(chain.token_ids) for chain in chains), chained, begun)
        left = [(branches, branch) for branches, branch in work if not branches.chained]
        for (branches, branch), chain in zip(chained, chains, strict=True):
            if chain.token_ids:
                branches.add_drawn(branch, drawn_by(chain))
            else:
                left.append((branches, branch))
        return left

    def _draw_step(self, work: Sequence[Work]) -> None:
        """Draw one token on each branch."""
        begun = self._clock()
        logits = self._drafter.step_branches(
            [branch.state for _, branch in work], [branch.current.newest for _, branch in work]
        )
        self._record_pass(len(work), work, begun)
        drawn = self._sampler.draw([branch.current for _, branch in work], logits)
        for (branches, branch), token in zip(work, drawn, strict=True):
            if token is None:
                branches.give_up(branch)
            else:
                branches.add_drawn(branch, [token])

    def _record_pass(self, rows: int, work: Iterable[Work], begun: float) -> None:
        self._passes.ran(rows, len({id(branches) for branches, _ in work}), self._clock() - begun)

    def adopt(self, command: DraftRound, held: HeldSequence[DraftProposal]) -> list[Drawn]:
        """The tokens of the branch that foresaw the verdict; its state becomes the sequence's.

        Empty if no branch did. The other branches are freed.
        """
        branches = self._remove(command.sequence_id)
        if branches is None:
            return []
        branch = self._foreseen(branches, held)
        drawn = [] if branch is None else self._adopt(branch, command, held)
        # A suffix is useless after a proposal that is shortened or incomplete.
        whole = len(drawn) == branches.depth == command.num_draft_tokens
        if branch is not None and branches.suffix(branch) and whole:
            self._adopted[command.sequence_id] = branches, branch
        else:
            branches.region.free()
        return drawn

    def _foreseen(self, branches: SequenceBranches, held: HeldSequence[DraftProposal]) -> DraftBranch | None:
        """The branch that foresaw the ledger. Every verdict updates the statistics of outcomes."""
        tokens = held.session.tokens
        accepted = branches.accepted_by(tokens)
        if accepted is None:
            return None
        branches.fan_out.observe(accepted, branches.margins, branches.rank(accepted, tokens[-1]))
        self.rounds += 1
        return branches.branches.get(Outcome(accepted, tokens[-1]))

    def _adopt(
        self, branch: DraftBranch, command: DraftRound, held: HeldSequence[DraftProposal]
    ) -> list[Drawn]:
        tokens, adopted = held.session.tokens, False
        with _survived("adopting a branch", command.sequence_id):
            self._drafter.adopt(held, branch.state)
            adopted = True
        if not adopted:
            held.cut_to(held.num_computed_tokens)
            return []
        self.hits += 1
        held.session.cached = [*tokens, *branch.draft.token_ids][: held.num_computed_tokens]
        drawn = branch.draft.drawn[: command.num_draft_tokens]
        fed = command.base_length + len(drawn) - 1 + (not drawn)
        held.cut_to(min(held.num_computed_tokens, fed))
        return drawn

    def discard(self, sequence_id: str) -> None:
        """Free the branches of a sequence."""
        branches = self._remove(sequence_id)
        if branches is not None:
            branches.region.free()

    def _remove(self, sequence_id: str) -> SequenceBranches | None:
        """Remove and return a sequence's branches, if any; its other lookahead state is dropped."""
        self._answered.pop(sequence_id, None)
        self._outcomes.pop(sequence_id, None)
        self._release_adopted(sequence_id)
        return self._by_sequence.pop(sequence_id, None)

    def free(self) -> bool:
        """Free all branches; returns False if there were none."""
        found = self._with_regions
        for branches in found:
            branches.region.free()
        for kept in (self._by_sequence, self._adopted, self._answered, self._outcomes):
            kept.clear()
        return bool(found)


def _depth_ahead(command: DraftRound) -> int:
    return command.num_lookahead_tokens or command.num_draft_tokens


@contextlib.contextmanager
def _survived(what: str, sequence_id: str) -> Iterator[None]:
    """Suppress errors of one sequence's branches, which only save time.

    Raises the error of a device that can no longer compute.
    """
    try:
        yield
    except ResourceExhaustedError:
        pass
    except Exception as error:
        own_error(error, what, sequence_id)  # logs the error; no answer is expected
