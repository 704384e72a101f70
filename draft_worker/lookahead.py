"""Looking ahead while verdicts are out: whose branches are drafted when, and what becomes of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence, Sized

from draft_worker.ahead import Ahead, Limb
from draft_worker.chaining import can_chain, chain_of
from draft_worker.chooser import Chooser, drawn_by
from draft_worker.drafting import Drafting
from draft_worker.fanout import WORTH_A_ROW, WORTH_DRAFTING, FanOut
from draft_worker.propose import Drawn, NoiseTape
from draft_worker.runner import Runner
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.errors import ResourceExhaustedError
from paceline.core.messages import DraftEvent, DraftProposal, DraftRound
from paceline.core.types import AcceptanceMode, Outcome
from paceline.engine.cancel import CancelToken
from paceline.engine.scheduling.passes import own_error
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.kv import BlockTable
from paceline.telemetry.worker import Passes

log = logging.getLogger(__name__)

Work = tuple[Ahead, Limb]


class Lookahead:
    """The branches of all sequences of a worker."""

    def __init__(
        self,
        runner: Runner,
        config: DraftConfig,
        chooser: Chooser,
        sequences: Sized,
        passes: Passes,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        clock: Clock,
    ) -> None:
        """`sequences`: all that the worker holds, with which each one shares the budget."""
        self._runner = runner
        self._config = config
        self._chooser = chooser
        self._sequences = sequences
        self._passes = passes
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._aheads: dict[str, Ahead] = {}
        self._came_true: dict[str, tuple[Ahead, Limb]] = {}
        """Branches that are a round's proposal now, until it is looked ahead of."""
        self._begun: dict[str, tuple[DraftRound, HeldSequence[DraftProposal], Drafting]] = {}
        """Rounds that are answered, and whose verdicts nothing is drafted for yet."""
        self.has_news = False
        """Branches grew, and the coordinator has not been told."""
        self._fan_outs: dict[tuple[AcceptanceMode, bool], FanOut] = {}
        self._cancel = CancelToken()
        self.rounds = 0
        """Rounds that followed a verdict a branch could have foreseen."""
        self.hits = 0
        """Those for which a branch was there, finished or not."""

    @property
    def has_work(self) -> bool:
        """True while there is something to draft, or to tell."""
        wants_passes = any(ahead.wants_passes for ahead in self._aheads.values())
        return bool(self._begun) or self.has_news or wants_passes

    @property
    def tables(self) -> list[BlockTable]:
        """The tables of all branches; with those of the sequences they own every used block."""
        return [table for ahead in self._with_blocks for table in ahead.region.tables]

    @property
    def _with_blocks(self) -> list[Ahead]:
        return [*self._aheads.values(), *(ahead for ahead, _ in self._came_true.values())]

    def reset_cancel(self) -> None:
        """Commands that came so far are about to be taken up."""
        self._cancel.reset()

    def interrupt(self) -> None:
        """A command waits: what is in progress ends with its step. May be called from any thread."""
        self._cancel.cancel()

    def begin(self, command: DraftRound, held: HeldSequence[DraftProposal], drafting: Drafting) -> None:
        """Look ahead of a verdict, where there is time and length: from the next step on, for whoever waits
        for this proposal has it first."""
        # Entries up to the last token of the longest branch, and one past it, must exist.
        base, k, depth = command.base_length, drafting.k, command.num_lookahead_tokens or drafting.k
        if self._branches_each() and base + k + depth + 1 <= self._max_model_len:
            self._begun[command.sequence_id] = command, held, drafting
        else:
            self._release(command.sequence_id)

    def _open(self) -> None:
        """Make room for the branches of rounds that began, where there is memory."""
        for sequence_id, (command, held, drafting) in self._begun.items():
            k, depth = drafting.k, command.num_lookahead_tokens or drafting.k
            tape = NoiseTape.record(held.session.params, command.base_length, k + depth + 1)
            skills = self._runner.chain_skills
            chained = can_chain(drafting, skills, self._eos_token_ids)
            least = WORTH_A_ROW if skills is not None and skills.row_by_row else WORTH_DRAFTING
            with _survived("making room for branches", sequence_id):
                of_round = held, command.round, drafting.drawn, depth, tape
                ahead = Ahead(*of_round, self._fan_out(held), chained, self._max_model_len, least)
                self._aheads[sequence_id] = ahead
                if before := self._came_true.get(sequence_id):
                    self._hand_over(*before, ahead)
            self._release(sequence_id)
        self._begun.clear()

    def _release(self, sequence_id: str) -> None:
        """A branch that came true is handed on, or of no use any more."""
        before = self._came_true.pop(sequence_id, None)
        if before is not None:
            before[0].region.free()

    def _fan_out(self, held: HeldSequence[DraftProposal]) -> FanOut:
        """What verdicts on requests that draw and accept alike have taught."""
        params = held.session.params
        return self._fan_outs.setdefault((params.mode, params.sampling.greedy), FanOut())

    def _hand_over(self, ahead: Ahead, limb: Limb, following: Ahead) -> None:
        """What was drawn beyond a branch is a branch of the round that it became."""
        drawn = ahead.heir(limb)
        slots = limb.entries.own_slots()
        self._runner.copy_slots(*following.inherit(drawn, slots[len(slots) - len(drawn) :]))

    def _branches_each(self) -> int:
        """Branches a sequence may have: with many sequences there is no idle time to fill."""
        if len(self._sequences) > self._config.lookahead_sequences:
            return 0
        return self._config.lookahead_branches // max(1, len(self._sequences))

    def step(self) -> list[DraftEvent]:
        """Draft on branches, no longer than a round that arrives can wait for."""
        self._open()
        self.has_news = False
        if events := self._continuations():  # what was inherited, or grew while a command came
            return events
        width = self._branches_each()
        work = [(ahead, limb) for ahead in self._aheads.values() for limb in ahead.next_limbs(width)]
        del work[self._config.max_batch_tokens :]  # what is left over waits for the next steps
        if not work:
            return []
        try:
            left = self._chain(work)
            if left:
                self._step(left)
        except Exception:
            log.exception("drafting on %d branches failed; going on without them", len(work))
            self.free()
            return []
        if self._cancel.cancelled:
            self.has_news = True  # what waits may well be the verdict, and nobody asks for these any more
            return []
        return self._continuations()

    def _continuations(self) -> list[DraftEvent]:
        """What is new for the coordinator."""
        aheads = self._aheads.values()
        return [event for ahead in aheads if (event := ahead.continuations()) is not None]

    def _chain(self, work: Sequence[Work]) -> list[Work]:
        """Draw chains to their end, or until a command waits; returns what has to be done step by step."""
        chained = [(ahead, limb) for ahead, limb in work if ahead.chained]
        if not chained:
            return list(work)
        others = self._chooser.num_others
        inputs = [
            chain_of(limb.newest, limb.entries, [limb.newest.newest], self._config, others)
            for _, limb in chained
        ]
        begun = self._clock()
        chains = self._runner.forward_chains(inputs, self._cancel)
        self._ran(sum(len(chain.token_ids) for chain in chains), chained, begun)
        left = [(ahead, limb) for ahead, limb in work if not ahead.chained]
        for (ahead, limb), chain in zip(chained, chains, strict=True):
            if chain.token_ids:
                ahead.take(limb, drawn_by(chain))
            else:
                left.append((ahead, limb))
        return left

    def _step(self, work: Sequence[Work]) -> None:
        """One token for each."""
        begun = self._clock()
        logits = self._runner.forward_branches([limb.next_input for _, limb in work])
        self._ran(len(work), work, begun)
        drawn = self._chooser.draw([limb.newest for _, limb in work], logits)
        for (ahead, limb), token in zip(work, drawn, strict=True):
            if token is None:
                ahead.give_up(limb)
            else:
                ahead.take(limb, [token])

    def _ran(self, rows: int, work: Iterable[Work], begun: float) -> None:
        self._passes.ran(rows, len({id(ahead) for ahead, _ in work}), self._clock() - begun)

    def adopt(self, command: DraftRound, held: HeldSequence[DraftProposal]) -> list[Drawn]:
        """What a branch has drawn for the outcome that came true; its entries become the sequence's own.

        Nothing where no branch foresaw it. The other branches are freed.
        """
        ahead = self._taken_away(command.sequence_id)
        if ahead is None:
            return []
        limb = self._foresaw(ahead, held)
        drawn = [] if limb is None else self._adopted(ahead, limb, command, held)
        # Beyond a proposal that is cut short, or not finished, nothing drawn is of use.
        if limb is not None and ahead.heir(limb) and len(drawn) == ahead.depth == command.num_draft_tokens:
            self._came_true[command.sequence_id] = ahead, limb
        else:
            ahead.region.free()
        return drawn

    def _foresaw(self, ahead: Ahead, held: HeldSequence[DraftProposal]) -> Limb | None:
        """The branch that foresaw the ledger; every verdict teaches which ones to expect."""
        tokens = held.session.tokens
        accepted = ahead.accepted_by(tokens)
        if accepted is None:
            return None
        ahead.fan_out.observe(accepted, ahead.margins, ahead.rank(accepted, tokens[-1]))
        self.rounds += 1
        return ahead.branches.get(Outcome(accepted, tokens[-1]))

    def _adopted(
        self, ahead: Ahead, limb: Limb, command: DraftRound, held: HeldSequence[DraftProposal]
    ) -> list[Drawn]:
        tokens, taken = held.session.tokens, False
        with _survived("taking a branch over", command.sequence_id):
            self._runner.adopt(limb.entries)
            taken = True
        if not taken:
            held.cut_to(held.table.length)
            return []
        self.hits += 1
        held.session.cached = [*tokens, *limb.drafting.token_ids][: held.table.length]
        drawn = limb.drafting.drawn[: command.num_draft_tokens]
        held.cut_to(min(held.table.length, command.base_length + len(drawn) - 1 + (not drawn)))
        return drawn

    def leave(self, sequence_id: str) -> None:
        """Give up the branches of a sequence."""
        ahead = self._taken_away(sequence_id)
        if ahead is not None:
            ahead.region.free()

    def _taken_away(self, sequence_id: str) -> Ahead | None:
        """Its branches, if it has any; all else of the sequence is given up."""
        self._begun.pop(sequence_id, None)
        self._release(sequence_id)
        return self._aheads.pop(sequence_id, None)

    def free(self) -> bool:
        """Give the blocks of all branches back; False when there were none."""
        found = self._with_blocks
        for ahead in found:
            ahead.region.free()
        for kept in (self._aheads, self._came_true, self._begun):
            kept.clear()
        return bool(found)


@contextlib.contextmanager
def _survived(what: str, sequence_id: str) -> Iterator[None]:
    """Where there is no room, or a device fails once, there are no branches: they only save time.

    Raises what a device raises that can compute no more.
    """
    try:
        yield
    except ResourceExhaustedError:
        pass
    except Exception as error:
        own_error(error, what, sequence_id)  # logs it; there is nobody to tell
