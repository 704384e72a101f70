"""From logits to verdicts for a batch of rounds: transforms, then each one's acceptance mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    TokenLogprobs,
)
from paceline.decoding import acceptance, sparse_acceptance
from paceline.decoding.coupled import coupled_choice
from paceline.decoding.gumbel_argmax import choose_rows
from paceline.decoding.logprobs import reported_logprobs
from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from paceline.decoding.rows.row_context import RowContext, ledger_counts
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.rows.row_params_cache import RowParamsCache
from paceline.decoding.sampling import dense_from_sparse, point_mass
from paceline.decoding.sparse_acceptance import SparseChains
from paceline.decoding.transforms import scores_of
from paceline.engine.scheduling.passes import broken_rows, usable_rows

_row_params = RowParamsCache()
_FEW: Final = 1 << 15
"""Logits that are judged sooner than what leads to that can be called: of one to three rounds of a small
vocabulary. More of them are looked at by what looks at many at a time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One round to decide: its request, the ledger, and the chain that was proposed."""

    params: SequenceParams
    ledger: Sequence[int]
    proposal: Proposal

    @property
    def num_draft(self) -> int:
        """K of this round."""
        return self.proposal.num_draft_tokens

    @property
    def rows(self) -> int:
        """Rows of logits this round owns."""
        return self.num_draft + 1

    @property
    def seed(self) -> int:
        """The request's seed; the coordinator has drawn one where the client gave none."""
        assert self.params.sampling.seed is not None
        return self.params.sampling.seed

    @property
    def target_decides(self) -> bool:
        """True when the target's own choice decides: coupled mode, and every mode at temperature 0."""
        return self.params.target_decides


def decide(
    cases: Sequence[Case],
    logits: Tensor,
    eos_token_ids: Sequence[int] = (),
) -> list[Outcome]:
    """Judge every round.

    Args:
        cases: the rounds.
        logits: float [sum of the cases' rows, V], each case's rows in order.
        eos_token_ids: the model's, for `min_tokens`.

    Returns:
        (accepted draft tokens, next token) of each case; -1 where no token is left to come next.
    """
    reading = _deliberate(cases, logits, eos_token_ids)
    return reading.of(_to_host([reading.numbers])[0])


def judge(
    cases: Sequence[Case],
    logits: Tensor,
    allowed: Tensor,
    eos_token_ids: Sequence[int] = (),
) -> list[Outcome | None]:
    """Judge every round whose logits are a distribution, also of what the request permits; None for others.

    Where tokens are drawn by ratios, a chain may be accepted up to a token behind which the model finds all
    impossible that is permitted. Then that is the verdict's next token, and what is to come behind it is the
    next round's question, as in plain decoding: without a verdict it would never come.

    What is told of a device comes from there in one copy. On a CPU, where looking costs nothing, rows that
    are no distribution are left out before anything is made of them, or, of few, by what chooses.

    Args:
        cases: the rounds.
        logits: as for `decide`, the model's own.
        allowed: the same, where the requests' grammars forbid nothing.
        eos_token_ids: the model's, for `min_tokens`.
    """
    if _on_host(logits):
        if allowed is logits and logits.numel() <= _FEW and _choose_alone(cases, eos_token_ids):
            return _at_once(cases, logits)
        sound = _sound(cases, [not broken for broken in broken_rows(logits)])
        kept = [case for case, fine in zip(cases, sound, strict=True) if fine]
        if len(kept) == len(cases):
            return _possible(cases, decide(cases, allowed, eos_token_ids))
        starts = [start for start, fine in zip(_starts(cases), sound, strict=True) if fine]
        rows = allowed[_rows(kept, starts)]
        verdicts = iter(_possible(kept, decide(kept, rows, eos_token_ids)) if kept else ())
        return [next(verdicts) if fine else None for fine in sound]
    reading = _deliberate(cases, allowed, eos_token_ids)
    usable, numbers = _to_host([usable_rows(logits).long(), reading.numbers])
    sound = _sound(cases, usable)
    told = _possible(cases, reading.of(numbers))
    return [v if fine else None for v, fine in zip(told, sound, strict=True)]


def _possible(cases: Sequence[Case], verdicts: Sequence[Outcome]) -> list[Outcome | None]:
    """None where no token is left: a model may find impossible all that a request permits."""
    return [v if v[1] >= 0 else _shorter(case, v[0]) for case, v in zip(cases, verdicts, strict=True)]


def _shorter(case: Case, accepted: int) -> Outcome | None:
    """The verdict that ends with its last accepted token; None without one, and where the target chooses."""
    if case.target_decides or not accepted:
        return None
    return Outcome(accepted - 1, case.proposal.token_ids[accepted - 1])


def _choose_alone(cases: Sequence[Case], eos: Sequence[int]) -> bool:
    """True when nothing but temperatures and noise stands between logits on a CPU and what is chosen."""
    return (
        all(c.target_decides for c in cases) and _params_of(cases, torch.device("cpu"), eos).only_temperature
    )


def _at_once(cases: Sequence[Case], logits: Tensor) -> list[Outcome | None]:
    """`judge` for such cases on a CPU, in one call."""
    samplings = [case.params.sampling for case in cases]
    tokens, usable = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.bool_)
    choose_rows(
        np.ascontiguousarray(logits.numpy()),
        np.array([case.rows for case in cases], dtype=np.int64),
        np.array([s.temperature or 1.0 for s in samplings], dtype=np.float32),
        np.array([not s.greedy for s in samplings], dtype=np.bool_),
        np.array([case.seed for case in cases], dtype=np.uint64),
        np.array([len(case.ledger) for case in cases], dtype=np.uint64),
        tokens,
        usable,
    )
    sound = _sound(cases, usable.tolist())
    return [v if fine else None for v, fine in zip(_accepted(cases, tokens.tolist()), sound, strict=True)]


def _on_host(tensor: Tensor) -> bool:
    """True where looking at numbers waits for nobody."""
    return tensor.device.type == "cpu"


def _sound(cases: Sequence[Case], usable: Sequence[int]) -> list[bool]:
    """Which cases have usable rows only."""
    return [all(usable[start : start + case.rows]) for case, start in zip(cases, _starts(cases), strict=True)]


@dataclass(frozen=True, slots=True)
class _Reading:
    """Verdicts where the logits are, and how they are read."""

    numbers: Tensor
    """int64, in one dimension."""
    of: Callable[[Sequence[int]], list[Outcome]]
    """(accepted draft tokens, next token) of each case, from these numbers on the host."""


def _to_host(tensors: Sequence[Tensor]) -> list[list[int]]:
    """int64 tensors of one dimension, in one copy."""
    values: list[int] = (tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))).tolist()
    ends = itertools.accumulate(len(tensor) for tensor in tensors)
    return [values[end - len(tensor) : end] for tensor, end in zip(tensors, ends, strict=True)]


def _deliberate(cases: Sequence[Case], logits: Tensor, eos_token_ids: Sequence[int]) -> _Reading:
    """All modes' verdicts; nothing here waits for the device."""
    readings: list[tuple[list[int], _Reading]] = []
    starts = _starts(cases)
    choosing = [i for i, case in enumerate(cases) if case.target_decides]
    for mode in AcceptanceMode:
        members = (
            choosing
            if mode is AcceptanceMode.COUPLED
            else [i for i, c in enumerate(cases) if c.params.mode is mode and not c.target_decides]
        )
        if not members:
            continue
        group = [cases[i] for i in members]
        rows = logits if len(group) == len(cases) else logits[_rows(group, [starts[i] for i in members])]
        if mode is AcceptanceMode.COUPLED:
            reading = _by_choice(group, rows, eos_token_ids)
        else:
            reading = _by_ratio(group, rows, mode, eos_token_ids)
        readings.append((members, reading))
    if len(readings) == 1:
        return readings[0][1]

    def read(numbers: Sequence[int]) -> list[Outcome]:
        results: dict[int, Outcome] = {}
        first = 0
        for members, reading in readings:
            last = first + len(reading.numbers)
            results.update(zip(members, reading.of(numbers[first:last]), strict=True))
            first = last
        return [results[i] for i in range(len(cases))]

    return _Reading(torch.cat([reading.numbers for _, reading in readings]), read)


def warm_up(device: torch.device) -> None:
    """Have what chooses and what judges by ratios compiled before anybody waits for it."""
    point = SparseDistribution(bytes(4), np.array(1, dtype="<f4").tobytes())
    for mode in AcceptanceMode:
        params = SequenceParams(SamplingParams(seed=0), mode, prompt_length=1)
        sent = () if mode is AcceptanceMode.COUPLED else (point,)
        cases, logits = [Case(params, (0,), Proposal((0,), (), sent))], torch.zeros(2, 1, device=device)
        decide(cases, logits)
        judge(cases, logits, logits)


def logprobs_of(
    cases: Sequence[Case], logits: Tensor, verdicts: Sequence[Outcome | None]
) -> list[tuple[TokenLogprobs, ...]]:
    """What the cases that ask for log-probabilities report of their verdicts' tokens; () for the others.

    Args:
        cases: the rounds.
        logits: as for `decide`.
        verdicts: what `judge` made of them.

    Returns:
        One entry a token of each case's verdict.
    """
    asked = [
        (i, start, verdict, case.params.sampling.logprobs)
        for i, (case, start, verdict) in enumerate(zip(cases, _starts(cases), verdicts, strict=True))
        if verdict is not None and case.params.sampling.logprobs is not None
    ]
    told: list[tuple[TokenLogprobs, ...]] = [()] * len(cases)
    if not asked:
        return told
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for i, start, (accepted, token), count in asked:
        rows.extend(range(start, start + accepted + 1))
        tokens.extend((*cases[i].proposal.token_ids[:accepted], token))
        counts.extend([count] * (accepted + 1))
    reported = iter(reported_logprobs(logits[rows], tokens, counts))
    for i, _, (accepted, _), _ in asked:
        told[i] = tuple(itertools.islice(reported, accepted + 1))
    return told


def _starts(cases: Sequence[Case]) -> list[int]:
    starts, row = [], 0
    for case in cases:
        starts.append(row)
        row += case.rows
    return starts


def _rows(group: Sequence[Case], starts: Sequence[int]) -> list[int]:
    return [row for case, start in zip(group, starts, strict=True) for row in range(start, start + case.rows)]


def _context(group: Sequence[Case], row_params: RowParams, vocab_size: int) -> RowContext | None:
    if not row_params.needs_context:
        return None
    wanted = set(row_params.needs_counts)
    return RowContext.build(
        row_params,
        [len(case.ledger) - case.params.prompt_length for case in group],
        [case.proposal.token_ids for case in group],
        [
            ledger_counts(case.ledger, case.params.prompt_length, vocab_size) if i in wanted else None
            for i, case in enumerate(group)
        ],
        ledgers=[case.ledger for case in group],
    )


def _layout(group: Sequence[Case], vocab: Tensor, eos: Sequence[int]) -> tuple[RowParams, RowContext | None]:
    row_params = _params_of(group, vocab.device, eos)
    return row_params, _context(group, row_params, vocab.shape[1])


def _params_of(group: Sequence[Case], device: torch.device, eos: Sequence[int]) -> RowParams:
    return _row_params.build(
        [case.params.sampling for case in group],
        [case.rows for case in group],
        device,
        eos,
        [case.params.bad_words_token_ids for case in group],
    )


def _chains(group: Sequence[Case], device: torch.device) -> tuple[Tensor, Tensor]:
    """The chains padded to the longest, int64 [S, K], and their lengths, int64 [S]."""
    longest = max(case.num_draft for case in group)
    padded = [[*c.proposal.token_ids, *([-1] * (longest - c.num_draft))] for c in group]
    draft = torch.tensor(padded, dtype=torch.int64, device=device).view(len(group), longest)
    return draft, torch.tensor([c.num_draft for c in group], device=device)


def _padded_rows(group: Sequence[Case], device: torch.device) -> Tensor:
    """int64 [S, K+1]: the row of each case's i-th distribution; the last one where a chain is shorter."""
    longest = max(case.num_draft for case in group)
    starts = _starts(group)
    index = [
        [start + min(i, c.num_draft) for i in range(longest + 1)]
        for c, start in zip(group, starts, strict=True)
    ]
    return torch.tensor(index, device=device)


def _by_choice(group: Sequence[Case], logits: Tensor, eos: Sequence[int]) -> _Reading:
    row_params, context = _layout(group, logits, eos)
    # A greedy row's scores are its logits as far as its choice goes.
    noise = [
        None if case.params.sampling.greedy else CoupledNoise(case.seed, len(case.ledger) + i)
        for case in group
        for i in range(case.rows)
    ]
    choices = coupled_choice(scores_of(logits, row_params, context), noise)
    return _Reading(choices, lambda own: _accepted(group, own))


def _accepted(group: Sequence[Case], choices: Sequence[int]) -> list[Outcome]:
    """Verdicts on the chains of cases whose rows the target chooses so."""
    return [
        Outcome(*acceptance.accept_coupled(case.proposal.token_ids, choices[start : start + case.rows]))
        for case, start in zip(group, _starts(group), strict=True)
    ]


def _by_ratio(group: Sequence[Case], logits: Tensor, mode: AcceptanceMode, eos: Sequence[int]) -> _Reading:
    row_params, context = _layout(group, logits, eos)
    p = scores_of(logits, row_params, context).softmax(-1, dtype=torch.float64)
    seeds = [case.seed for case in group]
    # Keyed by the round, not by the token: see noise.py.
    bases = [len(case.ledger) for case in group]
    longest = max(case.num_draft for case in group)
    accept_u = uniforms(seeds, bases, Purpose.ACCEPT_TEST, max(longest, 1), logits.device)
    next_u = uniforms(seeds, bases, Purpose.NEXT_TOKEN, 1, logits.device)[:, 0]
    judged = _sparsely if _on_host(p) else _densely
    accepted, tokens = judged(group, mode, p, accept_u, next_u)
    # Of a row where nothing is possible the softmax is NaN in every place.
    next_rows = torch.tensor(_starts(group), device=p.device) + accepted
    tokens = tokens.where(~p[next_rows, 0].isnan(), -1)
    count = len(group)
    return _Reading(
        torch.cat((accepted, tokens)), lambda told: list(map(Outcome, told[:count], told[count:]))
    )


def _sparsely(
    group: Sequence[Case], mode: AcceptanceMode, p: Tensor, accept_u: Tensor, next_u: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge on a CPU. p: float64 [sum of the cases' rows, V]; accept_u [S, K], next_u [S].

    Returns int64 [S] twice: accepted draft tokens, next token.
    """
    chains = SparseChains.of([case.proposal for case in group], p.shape[1])
    block = mode is AcceptanceMode.BLOCK
    judge = sparse_acceptance.accept_block if block else sparse_acceptance.accept_rejection
    accepted, tokens = judge(chains, p.numpy(), accept_u.numpy(), next_u.numpy())
    return torch.from_numpy(accepted), torch.from_numpy(tokens)


def _densely(
    group: Sequence[Case], mode: AcceptanceMode, p: Tensor, accept_u: Tensor, next_u: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge in tensors, where p is; otherwise as `_sparsely`."""
    draft, num_draft = _chains(group, p.device)
    q, rows = _drawn_from(group, draft, p.shape[1]), p[_padded_rows(group, p.device)]
    judge = acceptance.accept_block if mode is AcceptanceMode.BLOCK else acceptance.accept_rejection
    decision = judge(draft, num_draft, rows, q, accept_u[:, : draft.shape[1]], next_u)
    return decision.num_accepted, decision.next_token


def _drawn_from(group: Sequence[Case], draft: Tensor, vocab_size: int) -> Tensor:
    """q of every draft token, float64 [S, K, V]: as sent, or a point mass for a deterministic drafter."""
    q = point_mass(draft, vocab_size)
    where = [(s, i) for s, case in enumerate(group) for i in range(len(case.proposal.distributions))]
    if where:
        sent = [d for case in group for d in case.proposal.distributions]
        sequences, nodes = torch.tensor(where, device=draft.device).T
        q[sequences, nodes] = dense_from_sparse(sent, vocab_size, draft.device)
    return q
