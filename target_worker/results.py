"""What the rounds of a pass get of its rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.errors import InternalError
from paceline.core.messages import PromptLogprobs
from paceline.core.types import Outcome, TokenLogprobs
from paceline.decoding.logprobs import reported_logprobs
from paceline.engine.scheduling.mask import restricted
from paceline.engine.scheduling.passes import Job, PassResult, Scored, broken_rows
from target_worker.decide import Case, judge, logprobs_of
from target_worker.rounds import Round

Judgement = tuple[Outcome, tuple[TokenLogprobs, ...]]
"""(accepted draft tokens, next token), and what is reported of them."""
NO_CHOICE = "the target model's logits are not numbers, or leave no token to choose"
"""Which of both it is `judge` does not tell: on a device that would be another copy."""


def reads(jobs: Sequence[Job]) -> bool:
    """True while one of them has rows to compute that are not judged: of a prompt, mostly."""
    return any(job.remaining > job.rows for job in jobs)


def in_progress(result: PassResult, rounds: Mapping[str, Round]) -> tuple[list[Round], Tensor]:
    """The rounds of the finished jobs, but for those that have failed meanwhile, and their jobs' logits."""
    assert result.logits is not None
    kept: list[Round] = []
    kept_rows: list[int] = []
    row = 0
    for job in result.finished:
        if job.sequence_id in rounds:
            kept.append(rounds[job.sequence_id])
            kept_rows.extend(range(row, row + job.rows))
        row += job.rows
    return kept, result.logits if len(kept_rows) == row else result.logits[kept_rows]


def with_known_rows(rounds: list[Round], logits: Tensor) -> tuple[list[Round], Tensor]:
    """The rounds that can be judged, with rows that the pass computed for them and those known before.

    Args:
        rounds: those whose jobs are finished.
        logits: float32 [sum of the jobs' rows, V].

    Returns:
        The rounds but for those that are taken apart and have rows to come; float32 [sum of their rows, V],
        each one's in order.
    """
    if all(r.first_row is None and r.apart is None for r in rounds):
        return rounds, logits
    whole: list[Round] = []
    parts = [logits[:0]]
    for r, own in zip(rounds, torch.split(logits, [r.job.rows for r in rounds]), strict=True):
        rows = own if r.apart is None else r.with_next(own)
        if rows is not None:
            whole.append(r)
            parts += [rows] if r.first_row is None else [r.first_row.logits, rows]
    return whole, torch.cat(parts)


def judgements(
    rounds: Sequence[Round], logits: Tensor, eos_token_ids: Sequence[int]
) -> list[Judgement | None]:
    """What each round's rows make of it, [sum of the rounds' rows, V]; None where that is no verdict."""
    cases = [
        Case(
            r.job.held.session.params if r.restriction is None else r.restriction.params,
            r.job.held.session.tokens,
            r.command.proposal,
        )
        for r in rounds
    ]
    allowed = restricted(logits, [r.restriction for r in rounds], [case.rows for case in cases])
    verdicts = judge(cases, logits, allowed, eos_token_ids)
    settled = [None if v is None else r.settled(v) for r, v in zip(rounds, verdicts, strict=True)]
    return reported(cases, logits, settled)


def reported(
    cases: Sequence[Case], logits: Tensor, verdicts: Sequence[Outcome | None]
) -> list[Judgement | None]:
    """Verdicts with the log-probabilities that are asked for; arguments as for `logprobs_of`.

    None without a verdict: of logits that are not numbers, or find all impossible that is permitted.
    """
    return [
        None if verdict is None else (verdict, told)
        for verdict, told in zip(verdicts, logprobs_of(cases, logits, verdicts), strict=True)
    ]


def prompt_logprobs(part: Scored, round_number: int) -> PromptLogprobs:
    """Report the prompt's tokens that this part's rows foretell. Raises InternalError for no numbers."""
    if any(broken_rows(part.logits)):
        raise InternalError("the target model's logits are not numbers")
    session, count = part.job.held.session, len(part.logits)
    start = part.offset + 1
    wanted = session.params.sampling.prompt_logprobs or 0
    tokens = session.tokens[start : start + count]
    told = reported_logprobs(part.logits, tokens, [wanted] * count)
    return PromptLogprobs(session.sequence_id, session.epoch, round_number, start, tuple(told))
