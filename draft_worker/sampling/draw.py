"""Draws the next draft token of each sequence from the drafter's logits, and records how it was drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final, NamedTuple

import torch
from torch import Tensor

from paceline.core.limits import MAX_BAD_WORD_TOKENS
from paceline.core.types import SequenceParams, SparseDistribution
from paceline.decoding.coupled import Noise, Ranks, ranked, ranked_in_tensors, ranks_of
from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from paceline.decoding.rows.row_context import RowContext, counts_of
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.rows.row_params_cache import RowParamsCache
from paceline.decoding.sampling import to_sparse
from paceline.decoding.support import draw_in_tensors, draw_sparse
from paceline.decoding.transfer import rows_at, to_device, to_host
from paceline.decoding.transforms import scores_of
from paceline.engine.scheduling.passes import broken_rows, row_checks, usable_rows

_row_params = RowParamsCache()
_FLOAT: Final = Struct("<f")


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
    """Other modes: float64, one for each draw. Greedy decoding has neither."""

    @classmethod
    def record(cls, params: SequenceParams, base_length: int, k: int) -> NoiseTape:
        """Derive coupled noise from each token's position, or the draft's own noise from the round."""
        seed = params.sampling.seed
        assert seed is not None
        if params.sampling.greedy:
            return cls()
        if params.mode.facts.shares_noise:
            return cls(CoupledNoise(seed, base_length))
        made = uniforms([seed], [base_length], Purpose.DRAFT_DRAW, k, draft_index=params.draft_index)
        return cls(uniforms=made[0])


@dataclass(slots=True)
class DrawStep:
    """The inputs of one draw, besides the logits."""

    params: SequenceParams
    ledger: Sequence[int]
    drafts: list[int]
    """The draft tokens drawn so far after the ledger."""
    tape: NoiseTape
    """Noise of the whole round."""

    @property
    def tokens(self) -> list[int]:
        """What the next token follows."""
        return [*self.ledger, *self.drafts]


def draw_tokens(
    steps: Sequence[DrawStep],
    logits: Tensor,
    allowed: Tensor,
    support_mass: float,
    support_bound: int,
    eos_token_ids: Sequence[int] = (),
    num_others: int = 0,
) -> list[Drawn | None]:
    """Draw the next draft token of every sequence.

    Args:
        steps: one per sequence.
        logits: float [S, V], the draft's logits after each sequence's tokens so far.
        allowed: the same with -inf for what the requests' grammars forbid; `logits` itself without any.
        support_mass: share of q's probability mass that a sparse distribution keeps.
        support_bound: maximum number of tokens in a sparse distribution.
        eos_token_ids: the model's end-of-sequence ids, needed for `min_tokens`.
        num_others: how many other tokens to rank.

    Returns:
        One token per sequence, in order; None where the logits are no distribution.
    """
    scores = scores_after(steps, allowed, eos_token_ids)
    by_ratio = [i for i, step in enumerate(steps) if step.tape.uniforms is not None]
    noise = list(map(noise_of, steps))
    num_ranks = num_others + 1 if num_others or len(by_ratio) < len(steps) else 0
    draws = None
    if by_ratio:
        rows = scores if len(by_ratio) == len(steps) else rows_at(scores, by_ratio)
        u = torch.tensor([_uniform(steps[i]) for i in by_ratio], dtype=torch.float64)
        draws = _Draws(rows, u, support_mass, support_bound)
    read = _read_on_host if scores.device.type == "cpu" else _read_from_device
    found = read(logits, scores, noise, num_ranks, draws)
    by_step = dict(zip(by_ratio, found.drawn, strict=True))
    drawn = [by_step.get(i) or Drawn(found.ranks[i][0][0]) for i in range(len(steps))]
    if num_others:
        own_scores = dict(zip(by_ratio, found.own_scores, strict=True))
        drawn = _with_others(drawn, found.ranks, own_scores, num_others)
    return [None if broken else token for token, broken in zip(drawn, found.broken, strict=True)]


def scores_after(steps: Sequence[DrawStep], allowed: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """float32 [S, V]: the scores of the next token of every sequence; arguments as for `draw_tokens`."""
    row_params = _row_params.build(
        [step.params.sampling for step in steps],
        [1] * len(steps),
        allowed.device,
        eos_token_ids,
        [step.params.bad_words_token_ids for step in steps],
    )
    return scores_of(allowed, row_params, _context(steps, row_params, allowed.shape[1]))


def noise_of(step: DrawStep) -> CoupledNoise | None:
    """The coupled noise of the next token's position, in a mode that has it."""
    coupled = step.tape.coupled
    return None if coupled is None else coupled.after(len(step.drafts))


def has_mass(q: SparseDistribution) -> bool:
    """False where the model gives no probability to any token that the request permits."""
    # Probabilities may be in the order of ids, and the first one may be too small for float32.
    return q.uniform_over > 0 or any(p > 0 for (p,) in _FLOAT.iter_unpack(q.probabilities))


class _Draws(NamedTuple):
    """R rows to draw from supports."""

    rows: Tensor
    """float32 [R, V]: scores."""
    u: Tensor
    """float64 [R], on the host."""
    mass: float
    bound: int


class _Found(NamedTuple):
    """What is read of S rows, of which R are drawn from supports."""

    drawn: Sequence[Drawn]
    """R tokens."""
    own_scores: Sequence[float]
    """R scores of these tokens, without noise; on a CPU none unless others are ranked too."""
    ranks: Ranks
    """S rows; none if no ranks are wanted."""
    broken: Sequence[bool]
    """S: rows of the logits that are no distribution."""


def _read_on_host(
    logits: Tensor, scores: Tensor, noise: Noise, num_ranks: int, draws: _Draws | None
) -> _Found:
    drawn, own_scores = list[Drawn](), list[float]()
    if draws is not None:
        tokens, distributions = draw_sparse(*draws)
        drawn = list(map(Drawn, tokens, distributions))
        if num_ranks > 1:
            own_scores = draws.rows[range(len(tokens)), tokens].tolist()
    ranks = ranked(scores, noise, num_ranks) if num_ranks else []
    return _Found(drawn, own_scores, ranks, broken_rows(logits))


def _read_from_device(
    logits: Tensor, scores: Tensor, noise: Noise, num_ranks: int, draws: _Draws | None
) -> _Found:
    """As `_read_on_host`, in one copy from the device."""
    told = [*row_checks(logits)]
    if draws is not None:
        rows, u, mass, bound = draws
        chosen, *distributions = draw_in_tensors(rows, to_device(u, rows.device), mass, bound)
        told += [chosen, rows.gather(1, chosen[:, None])[:, 0], *distributions]
    if num_ranks:
        told += ranked_in_tensors(scores, noise, num_ranks)
    largest, sums, *told = to_host(told)
    drawn, own_scores = list[Drawn](), list[float]()
    if draws is not None:
        tokens, own, ids, probabilities, lengths, *told = told
        own_scores = own.tolist()
        drawn = list(map(Drawn, tokens.tolist(), to_sparse(ids, probabilities, lengths)))
    broken = [not usable for usable in usable_rows(largest, sums)]
    return _Found(drawn, own_scores, ranks_of(*told) if told else [], broken)


def draws_alone(params: SequenceParams, eos_token_ids: Sequence[int]) -> bool:
    """True if only a temperature and noise are applied to the logits to choose each token."""
    one = [params.sampling], [1], torch.device("cpu")
    row_params = _row_params.build(*one, eos_token_ids, [params.bad_words_token_ids])
    return row_params.only_temperature


def _uniform(step: DrawStep) -> float:
    """The uniform number for a step's draw, if its draft is judged by a probability ratio."""
    assert step.tape.uniforms is not None
    return float(step.tape.uniforms[len(step.drafts)])


def _with_others(
    drawn: Sequence[Drawn], ranks: Ranks, own_scores: Mapping[int, float], count: int
) -> list[Drawn]:
    """Add the next best tokens and the margin to each drawn token.

    Args:
        drawn: S tokens.
        ranks: the best tokens of each row and their values, best first.
        own_scores: scores of those tokens that need not be the best of their rows, by row.
        count: how many other tokens to report.
    """
    told = []
    for i, (d, best) in enumerate(zip(drawn, ranks, strict=True)):
        score = best[0][1] if d.token_id == best[0][0] else own_scores[i]
        others = [entry for entry in best if entry[0] != d.token_id]
        margin = score - others[0][1] if others else math.inf
        told.append(replace(d, others=tuple(token for token, _ in others[:count]), margin=margin))
    return told


def _context(steps: Sequence[DrawStep], row_params: RowParams, vocab_size: int) -> RowContext | None:
    """Context of each row; a sequence's context ends with its last draft token."""
    if not row_params.needs_context:
        return None
    return RowContext.build(
        row_params,
        [len(step.ledger) + len(step.drafts) - step.params.prompt_length for step in steps],
        [()] * len(steps),
        counts_of(row_params, lambda i: (steps[i].tokens, steps[i].params.prompt_length), vocab_size),
        ledgers=[
            [*step.ledger[-MAX_BAD_WORD_TOKENS:], *step.drafts] if step.params.bad_words_token_ids else ()
            for step in steps
        ],
    )
