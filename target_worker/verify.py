"""From a pass's logits to the outcomes of its rounds: grammars, transforms, then the rule of each mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from paceline.decoding.rows.row_context import RowContext, counts_of
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.rows.row_params_cache import RowParamsCache
from paceline.decoding.transfer import to_host
from paceline.decoding.transforms import scores_of
from paceline.engine.scheduling.mask import restricted
from paceline.engine.scheduling.passes import broken_rows, row_checks, usable_rows
from target_worker.acceptance.grouping import judge_by_kind
from target_worker.acceptance.interface import JudgeFew, Pending, RuleOutcome, on_host
from target_worker.acceptance.items import (
    VerifyItem,
    accepted_nodes,
    ending_with,
    rows_of,
    sound_items,
    starts_of,
)
from target_worker.acceptance.noise import RoundNoise
from target_worker.acceptance.registry import RULES
from target_worker.rounds import VerifyInProgress
from target_worker.verdicts import Judgement, with_logprobs

_row_params = RowParamsCache()
_FEW: Final = 1 << 15
"""Up to so many logits on a CPU a rule's shortcut is quicker than the calls of the other way: one to three
rounds of a small vocabulary."""
NO_CHOICE: Final = "the target model's logits are not numbers, or leave no token to choose"
"""Why a round has no outcome. `verify_items` does not say which of both: on a device that would be another
copy."""


def verify_rounds(
    rounds: Sequence[VerifyInProgress], logits: Tensor, eos_token_ids: Sequence[int]
) -> list[Judgement | None]:
    """Judge the rounds of a pass.

    Args:
        rounds: those whose rows are complete.
        logits: float32 [sum of the rounds' rows, V], each round's rows in order.
        eos_token_ids: the model's.

    Returns:
        One entry a round; None where `verify_items` gives none.
    """
    items = [
        VerifyItem(
            r.job.held.session.params if r.restriction is None else r.restriction.params,
            r.job.held.session.tokens,
            r.command.proposal,
        )
        for r in rounds
    ]
    allowed = restricted(logits, [r.restriction for r in rounds], [item.rows for item in items])
    outcomes = verify_items(items, logits, allowed, eos_token_ids)
    clipped = [None if o is None else r.clipped(o) for r, o in zip(rounds, outcomes, strict=True)]
    return with_logprobs(items, logits, clipped)


def verify_items(
    items: Sequence[VerifyItem],
    logits: Tensor,
    allowed: Tensor,
    eos_token_ids: Sequence[int] = (),
) -> list[Outcome | None]:
    """Judge every item by the rule of its mode.

    On a device everything that the host needs comes in one copy. On a CPU, where reading is free, items with
    rows that are no distribution are left out before anything is computed from them.

    Args:
        items: the rounds.
        logits: float32 [sum of the items' rows, V], each item's rows in order: the model's own.
        allowed: the same with -inf for what the requests' grammars forbid; `logits` itself without any.
        eos_token_ids: the model's, for `min_tokens`.

    Returns:
        One outcome an item. None where a row is not a distribution (NaN, infinity, or -inf throughout), or
        where every token that the request permits is impossible.
    """
    if not on_host(logits):
        pending = judge_all(items, allowed, eos_token_ids)
        numbers, *checks = to_host([pending.numbers, *row_checks(logits)])
        return _of_sound(items, pending.read(numbers.tolist()), sound_items(items, usable_rows(*checks)))
    if allowed is logits and logits.numel() <= _FEW and (judge_few := _shortcut(items, eos_token_ids)):
        return _settled(items, judge_few(items, logits))
    sound = sound_items(items, [not broken for broken in broken_rows(logits)])
    if all(sound):
        return _settled(items, _judge_now(items, allowed, eos_token_ids))
    kept = [item for item, fine in zip(items, sound, strict=True) if fine]
    starts = [start for start, fine in zip(starts_of(items), sound, strict=True) if fine]
    rows = allowed[rows_of(kept, starts)]
    outcomes = iter(_settled(kept, _judge_now(kept, rows, eos_token_ids)) if kept else ())
    return [next(outcomes) if fine else None for fine in sound]


def _judge_now(
    items: Sequence[VerifyItem], logits: Tensor, eos_token_ids: Sequence[int]
) -> list[RuleOutcome]:
    pending = judge_all(items, logits, eos_token_ids)
    return pending.read(to_host([pending.numbers])[0].tolist())


def judge_all(items: Sequence[VerifyItem], logits: Tensor, eos_token_ids: Sequence[int]) -> Pending:
    """Let each rule judge the items of its mode, without waiting for the device."""

    def judge(mode: AcceptanceMode, group: Sequence[VerifyItem], rows: Tensor) -> Pending:
        row_params = _params_of(group, rows.device, eos_token_ids)
        scores = scores_of(rows, row_params, _context(group, row_params, rows.shape[1]))
        return RULES[mode].judge(group, scores, RoundNoise(group))

    return judge_by_kind(items, logits, lambda item: item.params.judged_as, judge)


def _shortcut(items: Sequence[VerifyItem], eos_token_ids: Sequence[int]) -> JudgeFew | None:
    """The shortcut of the items' rule, where they share one and ask for a temperature at most."""
    mode = items[0].params.judged_as
    judge_few = RULES[mode].judge_few
    if judge_few is None or any(item.params.judged_as is not mode for item in items):
        return None
    only_temperature = _params_of(items, torch.device("cpu"), eos_token_ids).only_temperature
    return judge_few if only_temperature else None


def _of_sound(
    items: Sequence[VerifyItem], outcomes: Sequence[RuleOutcome], sound: Sequence[bool]
) -> list[Outcome | None]:
    return _settled(items, [o if fine else None for o, fine in zip(outcomes, sound, strict=True)])


def _settled(items: Sequence[VerifyItem], outcomes: Sequence[RuleOutcome | None]) -> list[Outcome | None]:
    return [None if o is None else _outcome_of(item, o) for item, o in zip(items, outcomes, strict=True)]


def _outcome_of(item: VerifyItem, outcome: RuleOutcome) -> Outcome | None:
    """The outcome of a round; one that has no next token ends with the last accepted token instead.

    Where tokens are drawn by ratios, a path may be accepted up to a token behind which the model finds every
    permitted token impossible. The last accepted token is then the next token, and the question of what
    follows it is left to the next round, as in plain decoding: without a verdict it would never come. Where
    the target decides, the round is repeated without draft tokens, which comes to the same.
    """
    accepted, next_token, last_node = outcome
    if next_token is not None:
        return Outcome(accepted, next_token, last_node)
    if accepted == 0 or item.params.target_decides:
        return None
    return ending_with(item.proposal, accepted_nodes(item.proposal, Outcome(accepted, -1, last_node)))


def _params_of(items: Sequence[VerifyItem], device: torch.device, eos_token_ids: Sequence[int]) -> RowParams:
    return _row_params.build(
        [item.params.sampling for item in items],
        [item.rows for item in items],
        device,
        eos_token_ids,
        [item.params.bad_words_token_ids for item in items],
    )


def _context(items: Sequence[VerifyItem], row_params: RowParams, vocab_size: int) -> RowContext | None:
    """What came before each row, where a request's parameters depend on it."""
    if not row_params.needs_context:
        return None
    return RowContext.build(
        row_params,
        [len(item.ledger) - item.params.prompt_length for item in items],
        [item.proposal.token_ids for item in items],
        counts_of(row_params, lambda i: (items[i].ledger, items[i].params.prompt_length), vocab_size),
        parents=[item.proposal.parents for item in items],
        ledgers=[item.ledger for item in items],
    )


def warm_up(device: torch.device) -> None:
    """Compile what the rules call, before the first request needs it."""
    point = SparseDistribution.point(0)
    for mode in RULES:
        params = SequenceParams(SamplingParams(seed=0), mode, prompt_length=1)
        sent = (point,) if mode.facts.needs_q else ()
        items, logits = [VerifyItem(params, (0,), Proposal((0,), (), sent))], torch.zeros(2, 1, device=device)
        _judge_now(items, logits, ())
        verify_items(items, logits, logits)
