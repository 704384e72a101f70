"""What the rounds of a pass get of its rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import InternalError
from paceline.core.messages import PromptLogprobs
from paceline.decoding.logprobs import reported_logprobs
from paceline.engine.passes import Job, PassResult, Scored
from target_worker.rounds import Round


def reads(jobs: Sequence[Job]) -> bool:
    """True while one of them has rows to compute that are not judged: of a prompt, mostly."""
    return any(job.remaining > job.rows for job in jobs)


def without(spoiled: set[str], result: PassResult) -> tuple[Sequence[Job], Tensor]:
    """The finished jobs but for those that have failed already, and their logits."""
    assert result.logits is not None
    if not spoiled:
        return result.finished, result.logits
    kept_jobs: list[Job] = []
    kept_rows: list[int] = []
    row = 0
    for job in result.finished:
        if job.sequence_id not in spoiled:
            kept_jobs.append(job)
            kept_rows.extend(range(row, row + job.rows))
        row += job.rows
    return kept_jobs, result.logits[kept_rows]


def with_first_rows(rounds: Sequence[Round], logits: Tensor) -> Tensor:
    """The rows of all rounds, from those that the pass computed for them and those that were known before.

    Args:
        logits: float32 [sum of the jobs' rows, V].

    Returns:
        float32 [sum of the rounds' rows, V], each one's in order.
    """
    if all(r.first_row is None for r in rounds):
        return logits
    parts: list[Tensor] = []
    row = 0
    for r in rounds:
        parts += [] if r.first_row is None else [r.first_row.logits]
        parts.append(logits[row : row + r.job.rows])
        row += r.job.rows
    return torch.cat(parts)


def prompt_logprobs(part: Scored, round_number: int) -> PromptLogprobs:
    """Report the prompt's tokens that this part's rows foretell."""
    session, count = part.job.held.session, len(part.logits)
    start = part.offset + 1
    wanted = session.params.sampling.prompt_logprobs or 0
    tokens = session.tokens[start : start + count]
    reported = reported_logprobs(part.logits, tokens, [wanted] * count)
    return PromptLogprobs(session.sequence_id, session.epoch, round_number, start, tuple(reported))


def not_numbers() -> InternalError:
    """The logits of a round are no distribution."""
    return InternalError("the target model's logits are not numbers")
