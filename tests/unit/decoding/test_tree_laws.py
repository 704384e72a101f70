"""Trees of several drafters are lossless, exactly; what would bias them is seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch

from paceline.core.errors import InvalidArgumentError
from paceline.decoding.trees import accept_tree_rejection
from tests.unit.decoding.tree_laws import (
    Ask,
    Change,
    Path,
    Row,
    Strategy,
    Try,
    drawn,
    error,
    merged,
    point,
    residual,
    without,
)


def row(rng: random.Random, size: int, zeros: int = 0) -> Row:
    weights = [rng.randint(1, 9) for _ in range(size)]
    for token in rng.sample(range(size), zeros):
        weights[token] = 0
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


class Model:
    """A distribution after each path, its own by seed."""

    def __init__(self, seed: int, size: int, zeros: int = 0) -> None:
        self._rows: dict[Path, Row] = {}
        self._rng = random.Random(seed)
        self._size, self._zeros = size, zeros

    def __call__(self, path: Path) -> Row:
        if path not in self._rows:
            self._rows[path] = row(self._rng, self._size, self._zeros)
        return self._rows[path]


P3, P4 = Model(1, 3), Model(2, 4)
A3, B3, C3 = Model(3, 3), Model(4, 3), Model(5, 3)
A4, B4 = Model(6, 4), Model(7, 4)


def siblings(tries: Sequence[Try], path: Path) -> list[int]:
    return [each.token for each in tries if each.after == path]


def independent(*drafts: Model) -> Strategy:
    """Iterative speculative sampling: one draw of each draft at the same place, each with its own q_k."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        return ((), drafts[len(tries)](())) if len(tries) < len(drafts) else None

    return ask


def chains(*drafts: tuple[Model, int]) -> Strategy:
    """A chain of each draft, one after the other; equal beginnings share nodes, not tries."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        done = 0
        for draft, length in drafts:
            mine = tries[done : done + length]
            if len(mine) < length:
                path = tuple(each.token for each in mine)
                return path, draft(path)
            done += length
        return None

    return ask


def shaped(draft: Model, parents: Sequence[int], *, replacement: bool) -> Strategy:
    """The shape is fixed beforehand; siblings with or without replacement."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        for parent in parents[len(tries) :]:
            after = () if parent < 0 else (*tries[parent].after, tries[parent].token)
            q: Row | None = draft(after)
            if not replacement:
                q = without(draft(after), siblings(tries, after))
            return None if q is None else (after, q)
        return None

    return ask


def best_first(draft: Model, most: int) -> Strategy:
    """Grows where a draw was likely, and keeps every draw."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        if len(tries) >= most:
            return None
        likelihood: dict[Path, Fraction] = {(): Fraction(1)}
        for each in tries:
            path = (*each.after, each.token)
            likelihood[path] = likelihood[each.after] * draft(each.after)[each.token]
        places = []
        for path, value in likelihood.items():
            q = without(draft(path), siblings(tries, path))
            if q is not None and len(path) < 2:
                places.append((value * max(q), path, q))
        if not places:
            return None
        _, path, q = max(places)
        return path, q

    return ask


def until_unlikely(draft: Model) -> Strategy:
    """A chain that ends behind an unlikely token, which it keeps."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        if len(tries) == 3 or (tries and tries[-1].q[tries[-1].token] < Fraction(3, 10)):
            return None
        path = tuple(each.token for each in tries)
        return path, draft(path)

    return ask


def copied(places: str, draft: Model, size: int) -> Strategy:
    """Copies (c) and draws (d) after the root, in this order; a draw may hit a copy's token."""

    def ask(tries: Sequence[Try]) -> Ask | None:
        if len(tries) == len(places):
            return None
        if places[len(tries)] == "c":
            return (), point(len(tries) % size, size)
        return (), draft(())

    return ask


SHAPES = [
    (-1, -1, -1),
    (-1, 0, 1),
    (-1, -1, 0, 0),
    (-1, 0, 0, 1),
    (-1, -1, 0, 1, 1),
    (-1, 0, 1, -1, 3),
]
LOSSLESS: dict[str, tuple[Strategy, Model, int]] = {
    "two drafts": (independent(A3, B3), P3, 2),
    "one draft twice": (independent(A3, A3), P3, 2),
    "three drafts": (independent(A3, B3, C3), P3, 2),
    "two drafts of four tokens": (independent(A4, B4), P4, 2),
    "disjoint drafts": (independent(Model(8, 4, zeros=2), Model(9, 4, zeros=2)), P4, 2),
    "a target with zeros": (independent(A4, B4), Model(10, 4, zeros=2), 2),
    "chains of two drafts": (chains((A3, 2), (B3, 2)), P3, 3),
    "chains of three drafts": (chains((A3, 2), (B3, 2), (C3, 1)), P3, 3),
    "best first": (best_first(A3, 5), P3, 3),
    "best first of four tokens": (best_first(A4, 4), P4, 3),
    "until unlikely": (until_unlikely(A3), P3, 4),
    "copies before draws": (copied("ccd", A3, 3), P3, 2),
    "copies behind draws": (copied("dcd", A3, 3), P3, 2),
    "copies alone": (copied("ccc", A4, 4), P4, 2),
}
for _parents in SHAPES:
    for _replacement in (True, False):
        _name = f"{_parents} with{'' if _replacement else 'out'} replacement"
        LOSSLESS[_name] = shaped(A3, _parents, replacement=_replacement), P3, 3


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_law_is_the_targets(name: str) -> None:
    strategy, p, length = LOSSLESS[name]
    assert error(strategy, p, length) == 0


@pytest.mark.parametrize("name", LOSSLESS)
def test_real_decisions_are_the_enumerated_ones(name: str) -> None:
    """For random uniforms, the path and the next token are those of the recursion in fractions."""
    strategy, p, _ = LOSSLESS[name]
    rng = random.Random(name)
    trees = [tries for _, tries in drawn(strategy) if tries]
    for tries in rng.sample(trees, min(40, len(trees))):
        token_ids, parents, nodes = merged(tries)
        paths: list[Path] = [()]
        for token, parent in zip(token_ids, parents, strict=True):
            paths.append((*paths[parent + 1], token))
        tests, last = [rng.random() for _ in tries], rng.random()
        decision = accept_tree_rejection(
            token_ids,
            parents,
            torch.tensor([[float(value) for value in p(path)] for path in paths], dtype=torch.float64),
            torch.tensor([[float(value) for value in each.q] for each in tries], dtype=torch.float64),
            torch.tensor(tests, dtype=torch.float64),
            torch.tensor([last], dtype=torch.float64),
            nodes,
        )
        path, token = decided(tries, p, tests, last)
        accepted = [node for node in decision.path[0].tolist() if node >= 0]
        assert [token_ids[node] for node in accepted] == list(path)
        assert int(decision.next_token) == token


def decided(
    tries: Sequence[Try], p: Callable[[Path], Row], tests: Sequence[float], last: float
) -> tuple[Path, int]:
    """The recursion for given uniforms."""
    path: Path = ()
    going = True
    while going:
        current, going = p(path), False
        for each, u in zip(tries, tests, strict=True):
            if each.after != path:
                continue
            if Fraction(u) * each.q[each.token] < current[each.token]:
                path, going = (*path, each.token), True
                break
            current = residual(current, each.q)
    above, total = Fraction(last), Fraction(0)
    for token, value in enumerate(current):
        total += value
        if above < total:
            return path, token
    raise AssertionError("the row does not sum to 1")


# ---- bugs ------------------------------------------------------------------------------------------


def one_try_a_node(tries: Sequence[Try]) -> Sequence[Try]:
    """Two drafts that drew the same token count as one, with the first one's q."""
    seen: dict[Path, Try] = {}
    for each in tries:
        seen.setdefault((*each.after, each.token), each)
    return list(seen.values())


def unrenormalised(draft: Model) -> Change:
    """Siblings without replacement, judged with the q of the first."""
    return lambda tries: [Try(each.after, each.token, draft(each.after)) for each in tries]


def without_unlikely(tries: Sequence[Try]) -> Sequence[Try]:
    """An unlikely draw is not sent."""
    return [each for each in tries if each.q[each.token] >= Fraction(3, 10)]


def likeliest_first(tries: Sequence[Try]) -> Sequence[Try]:
    """Siblings are sorted after the draw."""
    return sorted(tries, key=lambda each: (len(each.after), -each.q[each.token]))


def second_late(tries: Sequence[Try]) -> Sequence[Try]:
    """The second draft is left out when it drew a certain token, because that one takes it longer."""
    return tries[:1] if tries[1].token == 0 else tries


def cut_by_rows(most: int) -> Change:
    """As many tries as fit into the rows: one that shares a row costs none."""

    def change(tries: Sequence[Try]) -> Sequence[Try]:
        kept: list[Try] = []
        for each in tries:
            if len(merged([*kept, each])[0]) > most:
                break
            kept.append(each)
        return kept

    return change


def likelier_source(tries: Sequence[Try]) -> Sequence[Try]:
    """The draft whose token is likelier, chosen by its token."""
    return [max(tries, key=lambda each: each.q[each.token])]


def copy_wins(tries: Sequence[Try]) -> Sequence[Try]:
    """A draw that equals a copy before it is dropped."""
    copies = {each.token for each in tries if max(each.q) == 1}
    return [each for each in tries if max(each.q) == 1 or each.token not in copies]


BUGS: dict[str, tuple[Strategy, Model, Change]] = {
    "merged duplicates": (independent(A3, B3), P3, one_try_a_node),
    "an unrenormalised q": (shaped(A3, (-1, -1), replacement=False), P3, unrenormalised(A3)),
    "an unlikely draw dropped": (independent(A3, B3), P3, without_unlikely),
    "siblings sorted after the draw": (independent(A3, B3), P3, likeliest_first),
    "a late draft left out": (independent(A3, B3), P3, second_late),
    "a cut by merged rows": (
        independent(Model(34, 4), Model(40, 4), Model(34, 4)),
        Model(25, 4),
        cut_by_rows(2),
    ),
    "a source chosen by its token": (independent(A3, B3), P3, likelier_source),
    "a draw dropped for a copy": (copied("cd", A3, 3), P3, copy_wins),
}


@pytest.mark.planted
@pytest.mark.parametrize("bug", BUGS)
def test_catches(bug: str) -> None:
    strategy, p, change = BUGS[bug]
    assert error(strategy, p, 2) == 0
    assert error(strategy, p, 2, change) > Fraction(1, 200)


@pytest.mark.planted
def test_catches_drafts_sharing_their_noise() -> None:
    """Two drafts draw with one uniform: the second token depends on the first."""

    def shared(tries: Sequence[Try]) -> Ask | None:
        if len(tries) == 2:
            return None
        if not tries:
            return (), A3(())
        # What the second row gives on the part of the uniform that gave the first token.
        begin = sum(A3(())[: tries[0].token], Fraction(0))
        end = begin + A3(())[tries[0].token]
        total, parts = Fraction(0), []
        for value in B3(()):
            parts.append(max(Fraction(0), min(end, total + value) - max(begin, total)) / (end - begin))
            total += value
        return (), tuple(parts)

    def told_as_independent(tries: Sequence[Try]) -> Sequence[Try]:
        return [tries[0], Try((), tries[1].token, B3(()))]

    assert error(shared, P3, 2) == 0, "with the law that it was really drawn from it is a try like any other"
    assert error(shared, P3, 2, told_as_independent) > Fraction(1, 200)


@pytest.mark.parametrize(
    ("tries", "told"), [((0, 1, 2), "try 2 names node 2 of 2"), ((0, 0), "no try has drawn node 1")]
)
def test_tries_that_do_not_fit_are_refused(tries: Sequence[int], told: str) -> None:
    rows = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    with pytest.raises(InvalidArgumentError, match=told) as refused:
        accept_tree_rejection([1, 2], [-1, -1], rows, rows, uniforms, uniforms[:1], tries)
    assert refused.value.field == "proposal.tries"
