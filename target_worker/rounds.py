"""One verification in progress on the target, and the round that may follow it without a message. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.core.messages import VerifyAhead, VerifyRound
from paceline.core.types import Outcome, Proposal, SequenceParams, Verdict
from paceline.decoding.transfer import rows_at
from paceline.engine.scheduling.mask import Restriction
from paceline.engine.scheduling.passes import Job, PassResult
from paceline.engine.scheduling.session import Session
from paceline.engine.tree_places import TreePlaces
from target_worker.acceptance.items import accepted_nodes, ending_with
from target_worker.apart import RowsApart

NO_PROPOSAL = Proposal()
"""The proposal of a plain round."""


@dataclass(frozen=True, slots=True)
class PrecomputedRow:
    """The row of logits after a ledger, computed before its round began (preverify.py)."""

    logits: Tensor
    """float32 [1, V]."""
    outcome: Outcome | None
    """The outcome of a round without draft tokens: (0, next token). None where the logits are not a
    distribution, or leave no token that the request permits."""


@dataclass(slots=True)
class VerifyInProgress:
    """A verification in progress."""

    command: VerifyRound
    job: Job
    next_proposals: dict[Outcome, Proposal] = field(default_factory=dict)
    """What the next round judges, by the outcome of this one."""
    plain_otherwise: bool = False
    """After any other outcome the next round has no draft tokens."""
    restriction: Restriction | None = None
    """What its grammar allows in each row; None without a grammar."""
    precomputed: PrecomputedRow | None = None
    """Its first row, where that was known before: the job's rows are those after it."""
    apart: RowsApart | None = None
    """Where its rows could not be judged together."""

    @property
    def rows(self) -> int:
        """Rows of logits that are judged."""
        return self.command.proposal.num_draft_tokens + 1

    def take_apart(self) -> bool:
        """Compute its rows again, one a pass. False where that cannot help, or where the target decides."""
        session = self.job.held.session
        if self.apart is not None or self.rows == 1 or session.params.target_decides:
            return False
        self.apart, self.precomputed = RowsApart(self.command.proposal), None
        # The prompt's log-probabilities have been reported.
        self.job.reused, self.job.scored, self.job.parents = 0, False, ()
        self.job.feed_next(session.tokens[self.job.held.num_computed_tokens :], 1)
        return True

    def with_next(self, row: Tensor) -> Tensor | None:
        """All its rows, float32 [rows, V], with the next one that was computed apart; None before the last.

        They are not numbers if the row after the ledger is not.
        """
        apart, held = self.apart, self.job.held
        assert apart is not None
        if apart.at is not None:
            apart.add(row)
        if apart.at is not None:
            held.cut_to(self.command.base_length + apart.depth - 1)
            self.job.feed_next([self.command.proposal.token_ids[apart.at]], 1)
            return None
        whole = apart.whole()
        if whole is None:
            return row.expand(self.rows, -1)
        rows, allowed = whole
        if not allowed.all():
            r = self.restriction or Restriction(allowed, held.session.params)
            self.restriction = replace(r, allowed=allowed & r.allowed)
        return rows

    def lacks_entries(self, outcome: Outcome) -> bool:
        """True if the accepted path is to be fed once more: apart, another path of the tree came last."""
        if self.apart is None:
            return False
        held, base = self.job.held, self.command.base_length
        accepted = self.command.proposal.accepted(outcome)
        pairs = zip(accepted, held.session.cached[base:], strict=False)
        known = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if known == len(accepted):
            return False
        held.cut_to(base + known)
        self.job.feed_next([*accepted[known:]], 1)
        return True

    def clipped(self, outcome: Outcome) -> Outcome:
        """The outcome, no further than the grammar was followed.

        Where a path is accepted up to there, its last token is the next token. What may follow it is the
        next round's question, as in plain decoding. To repeat this round without its draft tokens would be a
        second draw where they lead to a dead end.
        """
        unfollowed = () if self.restriction is None else self.restriction.unfollowed
        if not unfollowed:
            return outcome
        path = accepted_nodes(self.command.proposal, outcome)
        end = next((i for i, node in enumerate(path) if node in unfollowed), None)
        return outcome if end is None else ending_with(self.command.proposal, path[: end + 1])

    def moves(self, outcome: Outcome) -> tuple[list[int], list[int]]:
        """The slots of entries to copy, from and to, before the table may be cut to an accepted path."""
        proposal = self.command.proposal
        if not proposal.is_tree or outcome.last_node is None or self.apart is not None:
            return [], []
        path, places = proposal.path_to(outcome.last_node), TreePlaces.of(proposal.parents)
        return self.job.held.moves_to(self.command.base_length, places, path)

    def following(self, outcome: Outcome, eos_token_ids: Collection[int]) -> VerifyRound | None:
        """The next round, if it was told for this outcome."""
        params = self.job.held.session.params
        return _told(self.command, self.next_proposals, self.plain_otherwise, outcome, params, eos_token_ids)


def is_prefilling(jobs: Sequence[Job]) -> bool:
    """True while a job has rows to compute that are not judged: mostly those of a prompt."""
    return any(job.remaining > job.rows for job in jobs)


def finished_rounds(
    result: PassResult, rounds: Mapping[str, VerifyInProgress]
) -> tuple[list[VerifyInProgress], Tensor]:
    """The rounds of the finished jobs, except those that have failed meanwhile, and their jobs' logits."""
    assert result.logits is not None
    kept: list[VerifyInProgress] = []
    kept_rows: list[int] = []
    row = 0
    for job in result.finished:
        if job.sequence_id in rounds:
            kept.append(rounds[job.sequence_id])
            kept_rows.extend(range(row, row + job.rows))
        row += job.rows
    return kept, result.logits if len(kept_rows) == row else rows_at(result.logits, kept_rows)


def complete_rounds(rounds: list[VerifyInProgress], logits: Tensor) -> tuple[list[VerifyInProgress], Tensor]:
    """The rounds that can be judged, with the rows of this pass and those known before.

    Args:
        rounds: those whose jobs are finished.
        logits: float32 [sum of the jobs' rows, V].

    Returns:
        The rounds except those that are taken apart and have rows to come; float32 [sum of their rows, V],
        each round's rows in order.
    """
    if all(r.precomputed is None and r.apart is None for r in rounds):
        return rounds, logits
    whole: list[VerifyInProgress] = []
    parts = [logits[:0]]
    for r, own in zip(rounds, torch.split(logits, [r.job.rows for r in rounds]), strict=True):
        rows = own if r.apart is None else r.with_next(own)
        if rows is not None:
            whole.append(r)
            parts += [rows] if r.precomputed is None else [r.precomputed.logits, rows]
    return whole, torch.cat(parts)


def following_late(
    command: VerifyAhead, session: Session[Verdict], eos_token_ids: Collection[int]
) -> VerifyRound | None:
    """The next round of a sequence whose verdict is out already; None where it was not told, or has begun."""
    verdict = session.answer
    if verdict is None or session.question is None or session.abandoned:
        return None
    if place(command) != (session.epoch, session.round, session.question[0]):
        return None
    told = command.proposals, command.plain_otherwise
    return _told(command, *told, verdict.outcome, session.params, eos_token_ids)


def _told(
    command: VerifyRound | VerifyAhead,
    proposals: Mapping[Outcome, Proposal],
    plain_otherwise: bool,
    outcome: Outcome,
    params: SequenceParams,
    eos_token_ids: Collection[int],
) -> VerifyRound | None:
    """The round after this one, which ended so; None where it was not told."""
    proposal = proposals.get(outcome)
    if proposal is None and plain_otherwise and not ends(params, outcome.next_token, eos_token_ids):
        proposal = NO_PROPOSAL
    return None if proposal is None else after(command, outcome.num_accepted, proposal)


def first_tokens(proposal: Proposal) -> tuple[int, ...]:
    """The draft tokens that may follow the ledger."""
    if not proposal.is_tree:
        return proposal.token_ids[:1]
    pairs = zip(proposal.token_ids, proposal.parents, strict=True)
    return tuple(token for token, parent in pairs if parent == -1)


def ends(params: SequenceParams, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """True where the sequence ends with this token: no round follows it by itself."""
    sampling = params.sampling
    is_end = token_id in eos_token_ids and not sampling.ignore_eos
    return is_end or token_id in sampling.stop_token_ids


def after(command: VerifyRound | VerifyAhead, accepted: int, proposal: Proposal) -> VerifyRound:
    """The round after this one with so many accepted draft tokens."""
    base = command.base_length + accepted + 1
    return VerifyRound(command.sequence_id, command.epoch, command.round + 1, base, (), proposal)


def place(command: VerifyRound | VerifyAhead) -> tuple[int, int, int]:
    """Which round of which sequence is meant: epoch, round, length of the ledger."""
    return command.epoch, command.round, command.base_length


def is_scored(params: SequenceParams, base_length: int) -> bool:
    """True when the round is to report the prompt's log-probabilities: the first one, and its repetitions."""
    wanted = params.sampling.prompt_logprobs is not None
    return wanted and 1 < base_length == params.prompt_length
