"""The draft worker without sockets and threads: rounds in, proposals out.

Each of the K steps is one pass over all drafting sequences, whatever step each one is at. A sequence's
prompt is prefilled by its first round, not before: prefill is lazy. After a full acceptance the entry of
dK is missing here, since the last draft token is never fed; the next round's feed includes it, because a
feed is always everything of the ledger that the cache lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draft_worker.propose import Drawn, NoiseTape, propose
from paceline.core.clock import Clock, monotonic
from paceline.core.config import WorkerConfig
from paceline.core.errors import InternalError, InvalidArgumentError, PacelineError
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
from paceline.engine.holdings import Held, Holdings
from paceline.engine.passes import Job, Runner, broken_rows, run_pass
from paceline.engine.session import Disposition, round_digest
from paceline.rpc.codec import check_token_ids


@dataclass(slots=True)
class _Round:
    """A proposal in progress."""

    command: DraftRound
    job: Job
    tape: NoiseTape
    drawn: list[Drawn] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The draft tokens so far."""
        return [d.token_id for d in self.drawn]

    @property
    def complete(self) -> bool:
        """True when all K tokens are drawn."""
        return len(self.drawn) == self.command.num_draft_tokens


class Drafter:
    """Proposes tokens with the draft model. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        runner: Runner,
        config: WorkerConfig,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        clock: Clock = monotonic,
    ) -> None:
        self._runner = runner
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self.holdings: Holdings[DraftProposal] = Holdings(
            runner.new_table, config.max_sequences, clock, config.lease_seconds
        )
        self._rounds: dict[str, _Round] = {}

    @property
    def has_work(self) -> bool:
        """True while a round lacks draft tokens."""
        return bool(self._rounds)

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""
        return sequence_id in self.holdings

    def handle(self, command: DraftCommand, arrived: float) -> list[DraftEvent]:
        """Take a command up. A refusal, or the answer to a repeated round, comes back at once."""
        try:
            match command:
                case OpenSequence():
                    self._open(command)
                case DraftRound():
                    return self._begin(command, arrived)
                case CloseSequence():
                    if self.holdings.close(command):
                        self._rounds.pop(command.sequence_id, None)
        except PacelineError as error:
            round_number = command.round if isinstance(command, DraftRound) else 0
            return [SequenceFailed(command.sequence_id, command.epoch, round_number, error)]
        return []

    def _open(self, command: OpenSequence) -> None:
        if not command.token_ids:
            raise InvalidArgumentError("token_ids", "a sequence needs at least one token")
        check_token_ids("token_ids", command.token_ids, self._vocabulary_size)
        sampling = command.params.sampling
        check_token_ids("logit_bias", sampling.logit_bias, self._vocabulary_size)
        check_token_ids("stop_token_ids", sampling.stop_token_ids, self._vocabulary_size)
        held = self.holdings.find(command.sequence_id)
        if held is not None and held.session.epoch < command.epoch:
            self._rounds.pop(command.sequence_id, None)
        self.holdings.open(command)

    def _begin(self, command: DraftRound, arrived: float) -> list[DraftEvent]:
        held = self.holdings.get(command.sequence_id)
        check_token_ids("committed_tail", command.committed_tail, self._vocabulary_size)
        if command.base_length + command.num_draft_tokens - 1 > self._max_model_len:
            raise InvalidArgumentError(
                "num_draft_tokens", f"end beyond the model's length of {self._max_model_len}"
            )
        disposition = held.session.begin(
            command.epoch,
            command.round,
            command.base_length,
            command.committed_tail,
            round_digest(command.base_length, num_draft_tokens=command.num_draft_tokens),
        )
        if disposition is Disposition.IN_PROGRESS:
            return []
        if disposition is Disposition.REPEAT:
            assert held.session.answer is not None
            return [held.session.answer]
        held.cut_to_ledger()
        feed = held.session.tokens[held.table.length :]
        tape = NoiseTape.record(
            held.session.params, command.base_length, command.num_draft_tokens, self._vocabulary_size
        )
        job = Job(held, feed, rows=1, arrived=arrived)
        self._rounds[command.sequence_id] = _Round(command, job, tape)
        return []

    def step(self) -> list[DraftEvent]:
        """Run one pass over the drafting sequences; return the proposals it completed."""
        jobs = [r.job for r in self._rounds.values()]
        result = run_pass(jobs, self._runner, self._config.max_batch_tokens, self._clock)
        events: list[DraftEvent] = [self._fail(job, error) for job, error in result.failed]
        if result.finished:
            assert result.logits is not None
            events.extend(self._draw(result.finished, result.logits))
        return events

    def _draw(self, finished: Sequence[Job], logits: torch.Tensor) -> list[DraftEvent]:
        begun = self._clock()
        rounds = [self._rounds[job.sequence_id] for job in finished]
        drawn = propose(
            [(r.job.held.session.params, r.job.held.session.tokens, r.token_ids, r.tape) for r in rounds],
            logits,
            self._config.support_mass,
            self._config.support_bound,
            self._eos_token_ids,
        )
        broken = broken_rows(logits)
        spent = self._clock() - begun
        events: list[DraftEvent] = []
        for r, token, is_broken in zip(rounds, drawn, broken, strict=True):
            if is_broken:
                events.append(self._fail(r.job, InternalError("the draft model's logits are not numbers")))
                continue
            r.job.compute += spent
            r.drawn.append(token)
            if r.complete:
                events.append(self._settle(r))
            else:
                r.job.feed_next([token.token_id], rows=1)
        return events

    def _settle(self, r: _Round) -> DraftProposal:
        command, held = r.command, r.job.held
        del self._rounds[command.sequence_id]
        distributions = tuple(d.distribution for d in r.drawn if d.distribution is not None)
        answer = DraftProposal(
            command.sequence_id,
            command.epoch,
            command.round,
            command.base_length,
            Proposal(tuple(r.token_ids), distributions=distributions),
            held.table.length,
            r.job.timings(),
        )
        held.session.finish(answer)
        return answer

    def _fail(self, job: Job, error: PacelineError) -> DraftEvent:
        """End a round without a proposal; the sequence stays, cut back to its ledger."""
        r = self._rounds.pop(job.sequence_id)
        held: Held[DraftProposal] = job.held
        held.cut_to_ledger()
        held.session.abandon_round()
        return SequenceFailed(r.command.sequence_id, r.command.epoch, r.command.round, error)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""
        self._rounds.pop(sequence_id, None)
        self.holdings.drop(sequence_id)

    def expire(self) -> None:
        """Drop the sequences whose lease is over, except those being computed."""
        for sequence_id in self.holdings.expired():
            if sequence_id not in self._rounds:
                self.holdings.drop(sequence_id)
