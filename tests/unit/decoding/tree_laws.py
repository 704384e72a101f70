"""The exact output of draft trees with several tries a node, in fractions, by enumerating every draw.

A `Strategy` draws a tree: it is asked for one try after another, and told the tokens of those before. That
is all a drafter may know, so whatever it decides by it must not bias the output. The bugs that tests plant
change the finished tree instead, or judge it wrongly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

Row = tuple[Fraction, ...]
"""A distribution over the vocabulary."""
Path = tuple[int, ...]
"""Tokens after the root."""


@dataclass(frozen=True)
class Try:
    """A token drawn from q after a path."""

    after: Path
    token: int
    q: Row


Ask = tuple[Path, Row]
"""Where the next try stands, and the distribution to draw it from."""
Strategy = Callable[[Sequence[Try]], Ask | None]
"""The next try after these; None ends the tree. A try may only stand at the root or after an earlier try."""
Change = Callable[[Sequence[Try]], Sequence[Try]]
"""A bug: what becomes of a tree before it is judged."""


def point(token: int, size: int) -> Row:
    return tuple(Fraction(int(token == other)) for other in range(size))


def without(row: Row, taken: Sequence[int]) -> Row | None:
    """Renormalised over the other tokens; None if these have no probability."""
    left = [Fraction(0) if token in taken else value for token, value in enumerate(row)]
    total = sum(left)
    return tuple(value / total for value in left) if total else None


def drawn(strategy: Strategy) -> Iterator[tuple[Fraction, list[Try]]]:
    """Every tree that can be drawn, with its probability."""
    unfinished: list[tuple[Fraction, list[Try]]] = [(Fraction(1), [])]
    while unfinished:
        weight, tries = unfinished.pop()
        ask = strategy(tries)
        if ask is None:
            yield weight, tries
            continue
        after, q = ask
        for token, value in enumerate(q):
            if value:
                unfinished.append((weight * value, [*tries, Try(after, token, q)]))


def residual(p: Row, q: Row) -> Row:
    """norm(max(0, p - q)); p itself where nothing is left, which has no probability of being reached."""
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return tuple(value / total for value in left) if total else p


def judged(tries: Sequence[Try], p: Callable[[Path], Row]) -> Iterator[tuple[Fraction, Path]]:
    """Every output of one tree, with its probability: the accepted path and the next token."""

    def at(path: Path, weight: Fraction) -> Iterator[tuple[Fraction, Path]]:
        current = p(path)
        for each in tries:
            if each.after != path:
                continue
            accepted = min(Fraction(1), current[each.token] / each.q[each.token])
            if accepted:
                yield from at((*path, each.token), weight * accepted)
            weight *= 1 - accepted
            if not weight:
                return
            current = residual(current, each.q)
        for token, value in enumerate(current):
            if value:
                yield weight * value, (*path, token)

    return at((), Fraction(1))


def error(
    strategy: Strategy, p: Callable[[Path], Row], length: int, change: Change = lambda tries: tries
) -> Fraction:
    """Largest difference of the law of the first `length` tokens from the target's.

    A shorter output goes on as the target does by itself.
    """
    law: dict[Path, Fraction] = {}
    for weight, tries in drawn(strategy):
        for share, output in judged(change(tries), p):
            for whole, more in _completed(output[:length], p, length):
                law[whole] = law.get(whole, Fraction(0)) + weight * share * more
    size = len(p(()))
    return max(
        abs(law.get(path, Fraction(0)) - _of_target(path, p))
        for path in itertools.product(range(size), repeat=length)
    )


def _completed(path: Path, p: Callable[[Path], Row], length: int) -> Iterator[tuple[Path, Fraction]]:
    if len(path) == length:
        yield path, Fraction(1)
        return
    for token, value in enumerate(p(path)):
        for whole, more in _completed((*path, token), p, length):
            yield whole, value * more


def _of_target(path: Path, p: Callable[[Path], Row]) -> Fraction:
    value = Fraction(1)
    for i, token in enumerate(path):
        value *= p(path[:i])[token]
    return value


def merged(tries: Sequence[Try]) -> tuple[list[int], list[int], list[int]]:
    """(token ids, parents, node of each try): tries of one token after one path share a node."""
    nodes: dict[Path, int] = {}
    token_ids: list[int] = []
    parents: list[int] = []
    of_try: list[int] = []
    for each in tries:
        path = (*each.after, each.token)
        if path not in nodes:
            nodes[path] = len(token_ids)
            token_ids.append(each.token)
            parents.append(nodes[each.after] if each.after else -1)
        of_try.append(nodes[path])
    return token_ids, parents, of_try
