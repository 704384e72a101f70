"""How well a draft's distributions agree with the target's, position by position. Pure.

p and q are float64 [N, V], the distributions of both models at N positions of one text. A row of q is 0 where
the drafter had no guess; every acceptance rate of that row is then 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """beta of each row, the sum of min(p, q) (theorem 3.5): float64 [N]. D_LK is 1 - beta."""
    return torch.minimum(p, q).sum(-1)


def coupled_terms(p: Tensor, q: Tensor) -> Tensor:
    """Probability that target and draft both choose token v under the same Gumbel noise: float64 [N, V].

    It is 1 / sum over w of max(p_w / p_v, q_w / q_v) (Daliri et al. 2025). The sum over v is the acceptance
    in coupled mode. In the order of p / q, the maximum is q_w / q_v before v and p_w / p_v from v on, so two
    cumulative sums give all terms.
    """
    ratio = torch.where(p > 0, p / q, 0.0)
    order = ratio.argsort(-1)
    p_sorted, q_sorted = p.gather(-1, order), q.gather(-1, order)
    from_here = p_sorted.flip(-1).cumsum(-1).flip(-1)
    before = functional.pad(q_sorted.cumsum(-1)[:, :-1], (1, 0))
    terms = 1 / (from_here / p_sorted + before / q_sorted)
    both = (p_sorted > 0) & (q_sorted > 0)
    return torch.zeros_like(p).scatter(-1, order, torch.where(both, terms, 0.0))


def equal_argmaxes(p: Tensor, q: Tensor) -> Tensor:
    """True where the most likely tokens are the same, the lowest id among equals: bool [N]."""
    return (_first_argmax(p) == _first_argmax(q)) & (q.sum(-1) > 0)


def rejection_sampling_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Acceptance of textbook rejection sampling, the least q / p (appendix A.2): float64 [N]."""
    return torch.where(p > 0, q / p, torch.inf).amin(-1)


def naive_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Acceptance of a rule that accepts a token if p >= q: float64 [N]."""
    return torch.where(p >= q, q, 0.0).sum(-1)


def accepted_given(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Probability that the ratio test accepted a draft token, given the token of the text: float64 [N].

    Token and acceptance are jointly min(p, q), and the token alone is p.
    """
    p_token, q_token = (part.gather(-1, tokens[:, None])[:, 0] for part in (p, q))
    return torch.minimum(p_token, q_token) / p_token


def coupled_given(p: Tensor, terms: Tensor, tokens: Tensor) -> Tensor:
    """As `accepted_given`, in coupled mode; `terms` are those of `coupled_terms`."""
    p_token, both = (part.gather(-1, tokens[:, None])[:, 0] for part in (p, terms))
    return both / p_token


def expected_rounds(accepted: Sequence[float], k: int) -> float:
    """Expected number of rounds that write a text, with `k` draft tokens in each.

    Unlike equation 1, this does not assume equal and independent acceptance rates. Given the text, whether a
    draft token was accepted depends on nothing but its position.

    Args:
        accepted: probability that a draft token at each position was accepted, given the text.
        k: draft tokens per round. The last round may end before its last token.
    """
    end = len(accepted)
    begins = [1.0, *[0.0] * end]
    """Probability that a round begins at each position."""
    for start in range(end):
        alive = begins[start]
        for place, rate in enumerate(accepted[start : start + k], start):
            begins[place + 1] += alive * (1 - rate)
            alive *= rate
        begins[min(start + k + 1, end)] += alive
    return sum(begins[:end])


def autocorrelation(texts: Sequence[Sequence[float]], lag: int) -> float | None:
    """Correlation of values `lag` positions apart, about the mean of all texts. None without variance."""
    count = sum(map(len, texts))
    pairs = sum(max(0, len(text) - lag) for text in texts)
    if not pairs:
        return None
    mean = sum(map(sum, texts)) / count
    variance = sum((value - mean) ** 2 for text in texts for value in text) / count
    if variance <= 1e-12:
        return None
    products = sum((a - mean) * (b - mean) for text in texts for a, b in zip(text, text[lag:], strict=False))
    return products / pairs / variance


def _first_argmax(rows: Tensor) -> Tensor:
    """`Tensor.argmax` returns any of equal maxima."""
    return (rows == rows.amax(-1, keepdim=True)).int().argmax(-1)
