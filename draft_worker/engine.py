"""The draft worker without sockets and threads: rounds in, proposals out.

Proposals are drawn by drawing.py, one step of all rounds at a time. After a full acceptance the state lacks
the entry of dK, since the last draft token is never fed; the next round feeds it, because a feed is always
everything of the ledger that the state lacks.

While no round wants a step, a draft that looks ahead prefills prompts of sequences that were opened
(lookahead/prefill_ahead.py) and drafts branches for the likely outcomes of the verifications in progress
(lookahead/branches.py), in turns. A round that arrives goes first, at the next step. A draft that does not
look ahead may share its device, so it reads a prompt only when a round asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.drafters.interface import BranchRegion, Drafter
from draft_worker.drawing import DraftInProgress, Drawing, cut_to_draft
from draft_worker.lookahead.fanout import MAX_RANK
from draft_worker.lookahead.lookahead import Lookahead
from draft_worker.lookahead.prefill_ahead import PrefillAhead
from draft_worker.sampling.draw import Drawn, NoiseTape
from draft_worker.sampling.guesses import Guesses
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.sampler import TokenSampler
from draft_worker.sub_drafters import sub_drafter_of
from draft_worker.trees.tree import DraftTree
from draft_worker.trees.trees import Trees
from paceline.core.clock import Clock, monotonic
from paceline.core.config import NO_SUB_DRAFTER, DraftConfig
from paceline.core.errors import InvalidArgumentError, PacelineError, ResourceExhaustedError
from paceline.core.limits import MAX_TREE_NODES
from paceline.core.messages import (
    CloseSequence,
    DraftCommand,
    DraftEvent,
    DraftProposal,
    DraftRound,
    OpenSequence,
    SequenceFailed,
)
from paceline.core.types import Proposal
from paceline.engine.scheduling.mask import grammar_for
from paceline.engine.scheduling.passes import Job
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.engine.scheduling.session import Disposition, question_of
from paceline.grammar import Grammars
from paceline.rpc.codec import check_opening, check_token_ids
from paceline.rpc.codec.status import code_name
from paceline.telemetry.span_interface import Attributes
from paceline.telemetry.worker import WorkerObserver, timings_told


class DraftEngine:
    """Proposes tokens with a drafter. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        drafter: Drafter,
        config: DraftConfig,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
        clock: Clock = monotonic,
        observer: WorkerObserver | None = None,
    ) -> None:
        self._drafter = drafter
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        self._clock = clock
        self.observer = WorkerObserver() if observer is None else observer
        self._rounds: dict[str, DraftInProgress] = {}
        self._guesses = Guesses(sub_drafter_of(config))
        num_others = MAX_RANK if config.lookahead_branches else 0
        self._sampler = TokenSampler(config, self._eos_token_ids, num_others)
        self._trees = Trees(drafter, self._sampler, config.max_batch_tokens, self._free_idle)
        passes = self.observer.passes["ahead"]
        self.lookahead = Lookahead(
            drafter,
            config,
            self._sampler,
            passes,
            max_model_len=max_model_len,
            eos_token_ids=self._eos_token_ids,
            clock=clock,
            trees=self._trees,
        )
        self._max_prefill_rows = config.max_mixed_prefill_tokens or None
        limits = config.max_batch_tokens, self._max_prefill_rows
        self._drawing = Drawing(
            drafter,
            config,
            self._sampler,
            self._trees,
            self._guesses,
            self._eos_token_ids,
            self.observer.passes["rounds"],
            clock,
            self._free_branches,
            self.lookahead.room_after_tree,
        )
        self._prefill_ahead = PrefillAhead(drafter, self._free_branches, passes, clock, *limits)
        self._prefilled_last = False
        """The last step without a round prefilled a prompt."""

    @property
    def sequences(self) -> HeldSequences[DraftProposal]:
        """Its sequences."""
        return self._drafter.sequences

    @property
    def max_tree_nodes(self) -> int:
        """Every drafter scores branches, of which trees are made."""
        return MAX_TREE_NODES

    @property
    def regions(self) -> list[BranchRegion]:
        """All regions beside the sequences' own state: of branches drafted ahead, and of trees."""
        return [*self.lookahead.regions, *self._trees.regions]

    @property
    def has_work(self) -> bool:
        """True while a round or a branch lacks draft tokens, or a prompt is not prefilled."""
        return bool(self._rounds) or self._prefill_ahead.has_work or self.lookahead.has_work

    def reset_cancel(self) -> None:
        """Called before waiting commands are taken up."""
        self.lookahead.reset_cancel()

    def notify(self, commands: Sequence[DraftCommand | SequenceFailed]) -> None:
        """Commands wait: a round is worth more than lookahead, which is cancelled. Called from any thread."""
        self.lookahead.interrupt()

    def batching_delay(self) -> float:
        """None: its steps are short, and verifications wait for them."""
        return 0.0

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""
        return sequence_id in self.sequences

    def handle(self, command: DraftCommand, arrived: float) -> list[DraftEvent]:
        """Take up a command. A refusal, or the answer to a repeated round, is returned at once."""
        try:
            match command:
                case OpenSequence():
                    self._open(command)
                case DraftRound():
                    return self._begin(command, arrived)
                case CloseSequence():
                    if self.sequences.close(command):
                        self._discard_work(command.sequence_id)
        except PacelineError as error:
            round_number = command.round if isinstance(command, DraftRound) else 0
            return [SequenceFailed(command.sequence_id, command.epoch, round_number, error)]
        return []

    def _open(self, command: OpenSequence) -> None:
        check_opening(command.token_ids, command.params, self._vocabulary_size, self._eos_token_ids)
        grammar = grammar_for(command.params, self.grammars)
        held = self.sequences.find(command.sequence_id)
        is_new = held is None or held.session.epoch < command.epoch
        if is_new:
            self._discard_work(command.sequence_id)
        self.sequences.open(command, grammar)
        if self._config.lookahead_branches and is_new:
            self._prefill_ahead.add(command.sequence_id)

    def _begin(self, command: DraftRound, arrived: float) -> list[DraftEvent]:
        held = self.sequences.get(command.sequence_id)
        check_token_ids("committed_tail", command.committed_tail, self._vocabulary_size)
        if not command.shape.is_chain and held.session.params.judged_as.facts.whole_chain:
            mode = held.session.params.mode.value
            raise InvalidArgumentError("tree_width", f"must be 1 in {mode} mode, which judges chains only")
        if command.base_length + command.num_draft_tokens - 1 > self._max_model_len:
            raise InvalidArgumentError(
                "num_draft_tokens", f"end beyond the model's length of {self._max_model_len}"
            )
        disposition = held.session.begin(
            command.epoch,
            command.round,
            command.base_length,
            command.committed_tail,
            question_of(command.base_length, num_draft_tokens=command.num_draft_tokens, shape=command.shape),
        )
        if disposition is Disposition.IN_PROGRESS:
            return []
        if disposition is Disposition.REPEAT:
            assert held.session.answer is not None
            return [held.session.answer]
        wants_tree = not command.shape.is_chain
        drawn: list[Drawn] = []
        tree: DraftTree | None = None
        if wants_tree:
            tree = self.lookahead.adopt_tree(command, held)
        else:
            drawn = self.lookahead.adopt(command, held)
        if not drawn and tree is None:
            self._trees.adopt(held)
        tokens, base, k = held.session.tokens, command.base_length, command.num_draft_tokens
        # Noise depends on the base length alone, so a branch drew the same tokens as would be drawn here.
        tape = NoiseTape.record(held.session.params, base, max(k, command.shape.nodes))
        draft = PartialDraft(held.session.params, tokens, k, tape, drawn, held.grammar)
        feed = [*tokens, *draft.token_ids][held.num_computed_tokens :]
        prefill = self._prefill_ahead.remove(command.sequence_id)
        job = Job(held, feed, rows=1, arrived=arrived, prefill=prefill)
        r = DraftInProgress(command, draft, job, wants_tree=wants_tree, tree=tree)
        self._rounds[command.sequence_id] = r
        if draft.complete or (tree is not None and tree.complete):
            return self._settle(r)
        self._drawing.feed(r, feed)
        return []

    def step(self) -> list[DraftEvent]:
        """Continue the rounds in progress. Without any, work ahead."""
        if not self._rounds:
            return self._step_ahead()
        events: list[DraftEvent] = []
        for r, error in self._drawing.advance(list(self._rounds.values())):
            events += self._settle(r) if error is None else self._break_off(r, error)
        return events

    def _step_ahead(self) -> list[DraftEvent]:
        """Prefill a prompt or look ahead, in turns where there is both to do. Unsent branches go first."""
        lookahead, prefill = self.lookahead, self._prefill_ahead
        turn = lookahead.has_work and self._prefilled_last
        self._prefilled_last = prefill.has_work and not lookahead.has_unsent and not turn
        if not self._prefilled_last:
            return lookahead.step()
        prefill.step()
        return []

    def _settle(self, r: DraftInProgress, error: str = "") -> list[DraftEvent]:
        """Answer the round, unless its proposal is known, and look ahead of its verdict.

        `error` is the code of the error that broke it off.
        """
        command, held, draft = r.command, r.job.held, r.draft
        del self._rounds[command.sequence_id]
        if r.tree is None:
            distributions = tuple(d.distribution for d in draft.drawn if d.distribution is not None)
            proposal = Proposal(tuple(draft.token_ids), distributions=distributions)
        else:
            proposal = r.tree.answer(command.num_draft_tokens, command.shape)
        answer = DraftProposal(
            command.sequence_id,
            command.epoch,
            command.round,
            command.base_length,
            proposal,
            held.num_computed_tokens,
            r.job.timings(),
        )
        held.session.finish(answer)
        if held.session.params.traceparent:
            self._trace(r, proposal.num_draft_tokens, error)
        if r.tree is not None:
            self.lookahead.begin_after_tree(command, r.tree)
        elif draft.complete and not command.no_lookahead:
            self.lookahead.begin(command, held, draft)
        return [] if command.proposal_known else [answer]

    def _trace(self, r: DraftInProgress, num_draft_tokens: int, error: str = "") -> None:
        """Record a span of the round."""
        where = r.job.held.session.params.traceparent, r.command.sequence_id, r.command.round
        attributes: Attributes = {
            "paceline.num_draft_tokens": num_draft_tokens,
            **timings_told(r.job.timings()),
        }
        self.observer.answered(*where, r.job.arrived, self._clock(), attributes, error)

    def _break_off(self, r: DraftInProgress, error: PacelineError) -> list[DraftEvent]:
        """End a round that cannot go on; where the target judges by ratios, with the tokens drawn so far.

        Whether the next token can be drawn may depend on them. If such proposals were dropped, the tokens of
        the others would have other distributions than the target is told.
        """
        # Room depends on time, and time on no token unless a sub-drafter guesses.
        no_room = isinstance(error, ResourceExhaustedError) and self._config.sub_drafter == NO_SUB_DRAFTER
        if r.draft.params.target_decides or not r.draft.drawn or no_room:
            return [self._fail(r, error)]
        cut_to_draft(r)
        return self._settle(r, code_name(error))

    def _fail(self, r: DraftInProgress, error: PacelineError) -> DraftEvent:
        """End a round without a proposal; the sequence stays, rolled back to its ledger."""
        del self._rounds[r.command.sequence_id]
        held: HeldSequence[DraftProposal] = r.job.held
        if held.session.params.traceparent:
            self._trace(r, 0, code_name(error))
        self._trees.release(r.command.sequence_id)
        held.cut_to_ledger()
        held.session.abandon_round()
        return SequenceFailed(r.command.sequence_id, r.command.epoch, r.command.round, error)

    def _discard_work(self, sequence_id: str) -> None:
        """Forget what is in progress for a sequence."""
        self._rounds.pop(sequence_id, None)
        self._guesses.forget(sequence_id)
        self._prefill_ahead.remove(sequence_id)
        self.lookahead.discard(sequence_id)
        self._trees.release(sequence_id)

    def _free_branches(self) -> bool:
        """Free the room of all branches and trees. Trees in progress are then sent as they stand."""
        freed = self.lookahead.free()
        return self._trees.free() or freed

    def _free_idle(self) -> bool:
        """Free the room of what no round waits for."""
        freed = self.lookahead.free()
        return self._trees.free_idle() or freed

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""
        self._discard_work(sequence_id)
        self.sequences.drop(sequence_id)

    def expire(self) -> None:
        """Drop the sequences whose lease is over, except those with a round in progress."""
        for sequence_id in self.sequences.expired():
            if sequence_id not in self._rounds:
                self._discard_work(sequence_id)
                self.sequences.drop(sequence_id)
