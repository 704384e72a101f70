"""Interpolated frequencies (Jelinek and Mercer 1980), with the weights of Witten and Bell (1991).

After a context h that was followed c times, by d different tokens:

    q_n(v | h) = λ · c(h, v) / c + (1 − λ) · q_{n−1}(v | h without its first token),   λ = c / (c + d)

The counts of a context weigh more the more often it was seen, and less the more different tokens followed it.
The base case is a uniform distribution, which makes q positive for every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def rest_weight(total: int, distinct: int) -> float:
    """1 − λ of a context that was followed `total` times, by `distinct` different tokens."""
    return distinct / (total + distinct)


def interpolated(contexts: Iterable[Mapping[int, int]], uniform: float) -> tuple[dict[int, float], float]:
    """q of the tokens that followed any of the contexts, and of each other token.

    Args:
        contexts: how often each token followed, for contexts from the shortest to the longest.
        uniform: q of each token without a context: 1 / vocabulary.
    """
    listed: dict[int, float] = {}
    rest = uniform
    for followers in contexts:
        total = sum(followers.values())
        kept = rest_weight(total, len(followers))
        rest *= kept
        listed = {token: q * kept for token, q in listed.items()}
        for token, count in followers.items():
            listed[token] = listed.get(token, rest) + (1 - kept) * count / total
    return listed, rest
