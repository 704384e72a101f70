"""Draws the next draft token of each sequence from the drafter's logits, and records how it was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.limits import MAX_BAD_WORD_TOKENS
from paceline.core.types import SequenceParams, SparseDistribution
from paceline.decoding.coupled import ranked
from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from paceline.decoding.rows.row_context import RowContext, ledger_counts
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.rows.row_params_cache import RowParamsCache
from paceline.decoding.support import draw_sparse
from paceline.decoding.transfer import rows_at
from paceline.decoding.transforms import scores_of

_row_params = RowParamsCache()


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draft token, and in modes where the target needs it, the distribution it was drawn from."""

    token_id: int
    distribution: SparseDistribution | None = None
    others: tuple[int, ...] = ()
    """The next best tokens by the same scores, best first: candidates for the target's correction."""
    margin: float = 0.0
    """Its score minus the best other token's: how sure the draft is. 0 unless other tokens are ranked."""


@dataclass(frozen=True, slots=True)
class NoiseTape:
    """All noise of one round. It depends on the seed and the round's position, and not on any token."""

    coupled: CoupledNoise | None = None
    """Coupled mode: the noise from the round's first token on."""
    uniforms: Tensor | None = None
    """Other modes: float64 [K]. Greedy decoding has neither."""

    @classmethod
    def record(cls, params: SequenceParams, base_length: int, k: int) -> NoiseTape:
        """Derive coupled noise from each token's position, or the draft's own noise from the round."""
        seed = params.sampling.seed
        assert seed is not None
        if params.sampling.greedy:
            return cls()
        if params.mode.facts.shares_noise:
            return cls(CoupledNoise(seed, base_length))
        return cls(uniforms=uniforms([seed], [base_length], Purpose.DRAFT_DRAW, k)[0])


@dataclass(slots=True)
class DrawStep:
    """The inputs of one draw, besides the logits."""

    params: SequenceParams
    ledger: Sequence[int]
    drafts: list[int]
    """The draft tokens drawn so far after the ledger."""
    tape: NoiseTape
    """Noise of the whole round."""


def draw_tokens(
    steps: Sequence[DrawStep],
    logits: Tensor,
    support_mass: float,
    support_bound: int,
    eos_token_ids: Sequence[int] = (),
    num_others: int = 0,
) -> list[Drawn]:
    """Draw the next draft token of every sequence.

    Args:
        steps: one per sequence.
        logits: float [S, V], the draft's logits after each sequence's tokens so far.
        support_mass: share of q's probability mass that a sparse distribution keeps.
        support_bound: maximum number of tokens in a sparse distribution.
        eos_token_ids: the model's end-of-sequence ids, needed for `min_tokens`.
        num_others: how many other tokens to rank.

    Returns:
        One token per sequence, in order.
    """
    row_params = _row_params.build(
        [step.params.sampling for step in steps],
        [1] * len(steps),
        logits.device,
        eos_token_ids,
        [step.params.bad_words_token_ids for step in steps],
    )
    scores = scores_of(logits, row_params, _context(steps, row_params, logits.shape[1]))
    by_ratio = [i for i, step in enumerate(steps) if step.tape.uniforms is not None]
    drawn = _draw_from_supports(steps, by_ratio, scores, support_mass, support_bound) if by_ratio else {}
    if len(by_ratio) == len(steps) and not num_others:
        return [drawn[i] for i in by_ratio]
    noise = [
        None if step.tape.coupled is None else step.tape.coupled.after(len(step.drafts)) for step in steps
    ]
    ranks = ranked(scores, noise, num_others + 1)
    proposed = [drawn.get(i) or Drawn(best[0][0]) for i, best in enumerate(ranks)]
    return _with_others(proposed, ranks, scores, num_others) if num_others else proposed


def draws_alone(params: SequenceParams, eos_token_ids: Sequence[int]) -> bool:
    """True if only a temperature and noise are applied to the logits to choose each token."""
    one = [params.sampling], [1], torch.device("cpu")
    row_params = _row_params.build(*one, eos_token_ids, [params.bad_words_token_ids])
    return row_params.only_temperature


def _draw_from_supports(
    steps: Sequence[DrawStep], members: Sequence[int], scores: Tensor, support_mass: float, support_bound: int
) -> dict[int, Drawn]:
    """Draw for the steps whose drafts are judged by a probability ratio. Returns tokens by step index."""
    rows = scores if len(members) == len(steps) else rows_at(scores, members)
    u = [_uniform(steps[i]) for i in members]
    drawn = draw_sparse(rows, torch.tensor(u, dtype=torch.float64), support_mass, support_bound)
    return dict(zip(members, map(Drawn, *drawn), strict=True))


def _uniform(step: DrawStep) -> float:
    """The uniform number for a step's draw, if its draft is judged by a probability ratio."""
    assert step.tape.uniforms is not None
    return float(step.tape.uniforms[len(step.drafts)])


def _with_others(
    drawn: Sequence[Drawn], ranks: Sequence[Sequence[tuple[int, float]]], scores: Tensor, count: int
) -> list[Drawn]:
    """Add the next best tokens and the margin to each drawn token.

    Args:
        drawn: S tokens.
        ranks: the best tokens of each row and their values, best first.
        scores: float [S, V], without noise; used for drawn tokens that are not the best of their row.
        count: how many other tokens to report.
    """
    own = [best[0][1] for best in ranks]
    away = [i for i, (d, best) in enumerate(zip(drawn, ranks, strict=True)) if d.token_id != best[0][0]]
    if away:
        for i, score in zip(away, scores[away, [drawn[i].token_id for i in away]].tolist(), strict=True):
            own[i] = score
    told = []
    for d, best, score in zip(drawn, ranks, own, strict=True):
        others = [entry for entry in best if entry[0] != d.token_id]
        margin = score - others[0][1] if others else math.inf
        told.append(replace(d, others=tuple(token for token, _ in others[:count]), margin=margin))
    return told


def _context(steps: Sequence[DrawStep], row_params: RowParams, vocab_size: int) -> RowContext | None:
    """Context of each row; a sequence's context ends with its last draft token."""
    if not row_params.needs_context:
        return None
    wanted = set(row_params.needs_counts)
    return RowContext.build(
        row_params,
        [len(step.ledger) + len(step.drafts) - step.params.prompt_length for step in steps],
        [()] * len(steps),
        [
            ledger_counts([*step.ledger, *step.drafts], step.params.prompt_length, vocab_size)
            if i in wanted
            else None
            for i, step in enumerate(steps)
        ],
        ledgers=[
            [*step.ledger[-MAX_BAD_WORD_TOKENS:], *step.drafts] if step.params.bad_words_token_ids else ()
            for step in steps
        ],
    )
