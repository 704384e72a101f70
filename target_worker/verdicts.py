"""What is reported with a verdict: log-probabilities of its tokens, and of the prompt's. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from paceline.core.errors import InternalError
from paceline.core.messages import PromptLogprobs
from paceline.core.types import Outcome, TokenLogprobs
from paceline.decoding.logprobs import reported_logprobs
from paceline.decoding.transfer import rows_at
from paceline.engine.scheduling.passes import Scored, broken_rows
from target_worker.acceptance.items import VerifyItem, accepted_nodes, starts_of

Judgement = tuple[Outcome, tuple[TokenLogprobs, ...]]
"""The outcome of a round, and what is reported of its tokens."""


def with_logprobs(
    items: Sequence[VerifyItem], logits: Tensor, outcomes: Sequence[Outcome | None]
) -> list[Judgement | None]:
    """Outcomes with the log-probabilities that the requests ask for.

    Args:
        items: the rounds.
        logits: float32 [sum of the items' rows, V], the model's own.
        outcomes: one an item.

    Returns:
        None where there is no outcome.
    """
    told = _logprobs_of(items, logits, outcomes)
    return [None if o is None else (o, of_item) for o, of_item in zip(outcomes, told, strict=True)]


def _logprobs_of(
    items: Sequence[VerifyItem], logits: Tensor, outcomes: Sequence[Outcome | None]
) -> list[tuple[TokenLogprobs, ...]]:
    """One entry a token of each outcome; none for items whose requests do not ask for them."""
    asked = [
        (i, start, outcome, item.params.sampling.logprobs)
        for i, (item, start, outcome) in enumerate(zip(items, starts_of(items), outcomes, strict=True))
        if outcome is not None and item.params.sampling.logprobs is not None
    ]
    told: list[tuple[TokenLogprobs, ...]] = [()] * len(items)
    if not asked:
        return told
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for i, start, outcome, count in asked:
        proposal = items[i].proposal
        rows.extend((start, *(start + 1 + node for node in accepted_nodes(proposal, outcome))))
        tokens.extend((*proposal.accepted(outcome), outcome.next_token))
        counts.extend([count] * (outcome.num_accepted + 1))
    reported = iter(reported_logprobs(rows_at(logits, rows), tokens, counts))
    for i, _, (accepted, *_), _ in asked:
        told[i] = tuple(itertools.islice(reported, accepted + 1))
    return told


def prompt_logprobs(part: Scored, round_number: int) -> PromptLogprobs:
    """Report the log-probabilities of the prompt's tokens that this part's rows predict.

    Raises InternalError: the logits are not numbers.
    """
    if any(broken_rows(part.logits)):
        raise InternalError("the target model's logits are not numbers")
    session, count = part.job.held.session, len(part.logits)
    start = part.offset + 1
    wanted = session.params.sampling.prompt_logprobs or 0
    tokens = session.tokens[start : start + count]
    told = reported_logprobs(part.logits, tokens, [wanted] * count)
    return PromptLogprobs(session.sequence_id, session.epoch, round_number, start, tuple(told))
