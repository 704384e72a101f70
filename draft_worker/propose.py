"""From the draft's logits to its next tokens, and how each one was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.limits import MAX_BAD_WORD_TOKENS
from paceline.core.types import AcceptanceMode, SequenceParams, SparseDistribution
from paceline.decoding.noise import Purpose, gumbel, uniforms
from paceline.decoding.noise_memo import CoupledNoise, NoiseMemo
from paceline.decoding.row_context import RowContext, ledger_counts
from paceline.decoding.row_params import RowParams, RowParamsMemo
from paceline.decoding.sampling import coupled_choice, greedy_choice
from paceline.decoding.support import draw_sparse
from paceline.decoding.transforms import log_probs_of, scores_of

_row_params = RowParamsMemo()


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draft token; `distribution` is what it was drawn from, where the target needs to know."""

    token_id: int
    distribution: SparseDistribution | None = None
    others: tuple[int, ...] = ()
    """The next best tokens, best first, by what it was drawn by: what the target may say instead."""
    margin: float = 0.0
    """By how much its score is above the best other one's, where others are ranked: how sure the draft is."""


@dataclass(frozen=True, slots=True)
class NoiseTape:
    """All noise of one round: it depends on the round's place alone, not on any token."""

    coupled: CoupledNoise | None = None
    """Of K tokens in coupled mode."""
    uniforms: Tensor | None = None
    """float64 [K] in the other modes."""

    @classmethod
    def record(cls, params: SequenceParams, base_length: int, k: int, noise: NoiseMemo) -> NoiseTape:
        """Coupled noise belongs to the token's position, a draft's own draws to the round (noise.py).

        The next round is expected to go on where this one ends.
        """
        seed = params.sampling.seed
        assert seed is not None
        if params.sampling.greedy:
            return cls()
        if params.mode is AcceptanceMode.COUPLED:
            noise.expect(params, base_length + k, k + 1)
            return cls(CoupledNoise(noise, seed, base_length, k))
        return cls._of_draws(params, base_length, k)

    @classmethod
    def _of_draws(cls, params: SequenceParams, base_length: int, k: int) -> NoiseTape:
        assert params.sampling.seed is not None
        return cls(uniforms=uniforms([params.sampling.seed], [base_length], Purpose.DRAFT_DRAW, k)[0])

    def of_round_at(self, base_length: int, more: int, params: SequenceParams, k: int) -> NoiseTape:
        """The noise of a round with `more` tokens more in its ledger than the `base_length` of this one.

        In coupled mode it is a part of this tape, which must be long enough.
        """
        if self.coupled is not None:
            return NoiseTape(self.coupled.part(more, more + k))
        if self.uniforms is None:
            return self
        return NoiseTape._of_draws(params, base_length + more, k)


Step = tuple[SequenceParams, Sequence[int], list[int], NoiseTape]
"""(request, ledger, draft tokens so far, noise of the round)."""


def propose(
    steps: Sequence[Step],
    logits: Tensor,
    support_mass: float,
    support_bound: int,
    eos_token_ids: Sequence[int] = (),
    num_others: int = 0,
) -> list[Drawn]:
    """Draw the next draft token of every sequence.

    Args:
        steps: one a sequence.
        logits: float [S, V], the draft's after each sequence's tokens so far.
        support_mass: share of q's mass the sparse distributions hold.
        support_bound: the most tokens in one of them.
        eos_token_ids: the model's, for `min_tokens`.
        num_others: how many other tokens to rank.

    Returns:
        One token a sequence, in order.
    """
    row_params = _row_params.build(
        [params.sampling for params, *_ in steps],
        [1] * len(steps),
        logits.device,
        eos_token_ids,
        [params.bad_words_token_ids for params, *_ in steps],
    )
    context = _context(steps, row_params, logits.shape[1])
    scores = scores_of(logits, row_params, context)
    if row_params.all_greedy:
        drawn = [Drawn(t) for t in greedy_choice(scores).tolist()]
    else:
        drawn, scores = _draw_all(steps, scores, row_params, support_mass, support_bound)
    return _ranked(drawn, scores, num_others) if num_others else drawn


def draws_alone(params: SequenceParams, eos_token_ids: Sequence[int]) -> bool:
    """True when nothing but a temperature and noise stands between the logits and each token."""
    one = [params.sampling], [1], torch.device("cpu")
    row_params = _row_params.build(*one, eos_token_ids, [params.bad_words_token_ids])
    return row_params.only_temperature


def _draw_all(
    steps: Sequence[Step], scores: Tensor, row_params: RowParams, support_mass: float, support_bound: int
) -> tuple[list[Drawn], Tensor]:
    """Tokens, and the scores [S, V] that rank what else each could have been."""
    drawn: dict[int, Drawn] = {}
    by_ratio = [i for i, step in enumerate(steps) if step[3].uniforms is not None]
    by_choice = [i for i, step in enumerate(steps) if step[3].uniforms is None]
    if by_ratio:
        rows = scores if len(by_ratio) == len(steps) else scores[by_ratio]
        u = [_uniform(steps[i]) for i in by_ratio]
        tokens, supports = draw_sparse(
            rows, torch.tensor(u, dtype=torch.float64), support_mass, support_bound
        )
        drawn.update(zip(by_ratio, map(Drawn, tokens, supports), strict=True))
    if by_choice:
        log_p = log_probs_of(scores, row_params)
        rows = log_p if len(by_choice) == len(steps) else log_p[by_choice]
        noise = _stacked_noise([steps[i] for i in by_choice], rows)
        choices = coupled_choice(rows, noise)
        if by_ratio:
            scores = log_p.double().index_add(0, torch.tensor(by_choice, device=rows.device), noise)
        else:
            scores = rows + noise
        drawn.update((i, Drawn(t)) for i, t in zip(by_choice, choices.tolist(), strict=True))
    return [drawn[i] for i in range(len(steps))], scores


def _uniform(step: Step) -> float:
    """The uniform of a step's draw, for a sequence whose draft is judged by a ratio."""
    _, _, drafts, tape = step
    assert tape.uniforms is not None
    return float(tape.uniforms[len(drafts)])


def _ranked(drawn: Sequence[Drawn], scores: Tensor, count: int) -> list[Drawn]:
    best = scores.topk(min(count + 1, scores.shape[1]), dim=-1)
    chosen = torch.tensor([[d.token_id] for d in drawn], device=scores.device)
    # The best other one is the second best, unless the token is not the best itself.
    leads = best.indices[:, :1] == chosen
    margins = scores.gather(1, chosen) - torch.where(leads, best.values[:, 1:2], best.values[:, :1])
    # One copy to the host; float64 has every token id exactly.
    told = torch.cat([margins.double(), best.indices.double()], dim=1).tolist()
    return [
        replace(d, others=tuple(int(t) for t in tokens if t != d.token_id)[:count], margin=margin)
        for d, (margin, *tokens) in zip(drawn, told, strict=True)
    ]


def _stacked_noise(steps: Sequence[Step], rows: Tensor) -> Tensor:
    """float64 [S, V]; anything for greedy sequences, whose point mass no noise can move."""
    if rows.device.type != "cpu":
        where = [(t.coupled.seed, t.coupled.first + len(d)) if t.coupled else (0, 0) for _, _, d, t in steps]
        return gumbel([seed for seed, _ in where], [at for _, at in where], rows.shape[1], rows.device)
    silent = torch.zeros(rows.shape[1], dtype=torch.float64)
    noise = (tape.coupled.rows()[len(d)] if tape.coupled else silent for _, _, d, tape in steps)
    return torch.stack(list(noise))


def _context(steps: Sequence[Step], row_params: RowParams, vocab_size: int) -> RowContext | None:
    """What came before each row. The last draft token of a sequence is the newest of its context."""
    if not row_params.needs_context:
        return None
    wanted = set(row_params.needs_counts)
    return RowContext.build(
        row_params,
        [len(ledger) + len(drafts) - params.prompt_length for params, ledger, drafts, _ in steps],
        [()] * len(steps),
        [
            ledger_counts([*ledger, *drafts], params.prompt_length, vocab_size) if i in wanted else None
            for i, (params, ledger, drafts, _) in enumerate(steps)
        ],
        ledgers=[
            [*ledger[-MAX_BAD_WORD_TOKENS:], *drafts] if params.bad_words_token_ids else ()
            for params, ledger, drafts, _ in steps
        ],
    )
