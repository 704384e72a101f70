"""Proposals of several drafts in one prefix tree: lossless where the target judges by q, by enumeration."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from coordinator.proposers.merged import merged
from paceline.core.types import Proposal, SparseDistribution
from tests.unit.decoding.test_tree_laws import A3, A4, B3, B4, P3, P4, Model, chains
from tests.unit.decoding.tree_laws import Ask, Change, Path, Row, Strategy, Try, error, point

Merge = Callable[[Sequence[Proposal]], Proposal]


def paths(proposal: Proposal) -> list[Path]:
    """Of each node, in their order."""
    found: list[Path] = []
    for node, token in enumerate(proposal.token_ids):
        parent = proposal.parents[node] if proposal.parents else node - 1
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


# ---- without distributions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposals", "whole"),
    [
        ([], Proposal()),
        ([Proposal(), Proposal((1, 2))], Proposal((1, 2))),
        ([Proposal((1, 2)), Proposal((1, 2, 3))], Proposal((1, 2, 3))),
        ([Proposal((1, 2)), Proposal((3,))], Proposal((1, 3, 2), (-1, -1, 0))),
        ([Proposal((1, 2)), Proposal((1, 3))], Proposal((1, 2, 3), (-1, 0, 0))),
        (
            [Proposal((1, 2, 4), (-1, -1, 1)), Proposal((2, 5))],
            Proposal((1, 2, 5, 4), (-1, -1, 1, 1)),
        ),
        ([Proposal((1,)), Proposal((2,)), Proposal((1,))], Proposal((1, 2), (-1, -1))),
    ],
    ids=["none", "one", "equal", "apart", "one beginning", "trees", "three"],
)
def test_equal_nodes_merge_and_drafts_take_turns(proposals: list[Proposal], whole: Proposal) -> None:
    assert merged(proposals) == whole


def test_a_single_proposal_stays_as_it_is() -> None:
    """Also a tree that is a chain, and one with several tries of one node."""
    q = SparseDistribution(b"\1\0\0\0", b"\0\0\x80\x3f")
    for proposal in (Proposal((1, 2), (-1, 0)), Proposal((1,), (-1,), (q, q), (0, 0))):
        assert merged([Proposal(), proposal]) is proposal


@pytest.mark.parametrize("seed", range(30))
def test_any_number_of_first_nodes_has_the_drafts_first_ones(seed: int) -> None:
    """The first n nodes hold the first n / N of each draft, and no path that none proposed."""
    rng = random.Random(seed)
    proposals = [random_tree(rng) for _ in range(rng.randint(2, 4))]
    whole = merged(proposals)
    everything = {path for each in proposals for path in paths(each)}
    assert sorted(paths(whole)) == sorted(everything)
    for n in range(whole.num_draft_tokens + 1):
        kept = set(paths(whole.first(n)))
        assert len(kept) == n
        for each in proposals:
            assert set(paths(each)[: n // len(proposals)]) <= kept


def random_tree(rng: random.Random) -> Proposal:
    token_ids, parents = [], []
    seen = set()
    for _ in range(rng.randint(1, 6)):
        parent, token = rng.randint(-1, len(parents) - 1), rng.randint(0, 3)
        if (parent, token) not in seen:
            seen.add((parent, token))
            parents.append(parent)
            token_ids.append(token)
    return Proposal(tuple(token_ids), tuple(parents))


# ---- with distributions ----------------------------------------------------------------------------


def encoded(row: Row) -> SparseDistribution:
    ids = [token for token, value in enumerate(row) if value]
    values = np.array([float(row[token]) for token in ids], dtype="<f4")
    return SparseDistribution(np.array(ids, dtype="<u4").tobytes(), values.tobytes())


def proposed(tries: Sequence[Try], known: dict[SparseDistribution, Row]) -> Proposal:
    """One draft's chain. A row without a draw is not sent."""
    distributions = [encoded(each.q) for each in tries]
    known.update(zip(distributions, (each.q for each in tries), strict=True))
    drawn = not all(max(each.q) == 1 for each in tries)
    return Proposal(tuple(each.token for each in tries), (), tuple(distributions) if drawn else ())


def tries_of(proposal: Proposal, known: dict[SparseDistribution, Row]) -> list[Try]:
    """What the target judges."""
    found = paths(proposal)
    nodes = proposal.tries or range(len(found))
    return [
        Try(found[node][:-1], found[node][-1], known[q])
        for node, q in zip(nodes, proposal.distributions, strict=True)
    ]


def sent(merge: Merge, *lengths: int, size: int = 3) -> Change:
    """What becomes of the chains of several drafts on their way to the target."""

    def change(tries: Sequence[Try]) -> Sequence[Try]:
        known = {encoded(point(token, size)): point(token, size) for token in range(size)}
        proposals, rest = [], list(tries)
        for length in lengths:
            proposals.append(proposed(rest[:length], known))
            rest = rest[length:]
        return tries_of(merge(proposals), known)

    return change


def copy_then_draw(tries: Sequence[Try]) -> Ask | None:
    """A deterministic draft proposes 0 0, one with a model draws two tokens."""
    if len(tries) < 2:
        return tuple(each.token for each in tries), point(0, 3)
    mine = tries[2:]
    path = tuple(each.token for each in mine)
    return (path, B3(path)) if len(mine) < 2 else None


CASES: dict[str, tuple[Strategy, Model, int, tuple[int, ...]]] = {
    "two drafts": (chains((A3, 2), (B3, 2)), P3, 3, (2, 2)),
    "the same draft twice": (chains((A3, 2), (A3, 2)), P3, 3, (2, 2)),
    "three drafts": (chains((A3, 2), (B3, 1), (A3, 1)), P3, 3, (2, 1, 1)),
    "four tokens": (chains((A4, 1), (B4, 1)), P4, 2, (1, 1)),
    "a point mass before draws": (copy_then_draw, P3, 3, (2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_law_of_merged_proposals_is_the_targets(name: str) -> None:
    strategy, p, length, lengths = CASES[name]
    assert error(strategy, p, length, sent(merged, *lengths, size=len(p(())))) == 0


def test_draws_of_one_token_are_two_tries_of_one_node() -> None:
    q, r = encoded(A3(())), encoded(B3(()))
    whole = merged([Proposal((1, 2), (), (q, q)), Proposal((1, 0), (), (r, r))])
    assert whole == Proposal((1, 2, 0), (-1, 0, 0), (q, q, r, r), (0, 1, 0, 2))
    # Further drafts go on from a tree that has such nodes.
    more = merged([whole, Proposal((1,), (), (q,))])
    assert more == Proposal((1, 2, 0), (-1, 0, 0), (q, q, r, r, q), (0, 1, 0, 2, 0))


def test_a_point_mass_among_draws_is_written_out() -> None:
    q = encoded(A3(()))
    whole = merged([Proposal((2,)), Proposal((1,), (), (q,))])
    assert whole == Proposal((2, 1), (-1, -1), (encoded(point(2, 3)), q), (0, 1))


def test_tries_count_before_they_are_merged() -> None:
    q = encoded(A3(()))
    whole = merged([Proposal((1,), (), (q,)), Proposal((1,), (), (q,))])
    assert (whole.num_draft_tokens, len(whole.tries)) == (1, 2)


# ---- bugs ------------------------------------------------------------------------------------------


def one_try_a_node(proposals: Sequence[Proposal]) -> Proposal:
    """Equal draws count once, with the first draft's q."""
    whole = merged(proposals)
    firsts = [whole.tries.index(node) for node in range(whole.num_draft_tokens)]
    return Proposal(whole.token_ids, whole.parents, tuple(whole.distributions[i] for i in firsts))


def cut_by_rows(most: int) -> Merge:
    """As many tries as fit into the rows: one that shares a row costs none."""

    def merge(proposals: Sequence[Proposal]) -> Proposal:
        whole = merged(proposals)
        fitting = next((i for i, node in enumerate(whole.tries) if node >= most), len(whole.tries))
        return replace(
            whole,
            token_ids=whole.token_ids[:most],
            parents=whole.parents[:most],
            distributions=whole.distributions[:fitting],
            tries=whole.tries[:fitting],
        )

    return merge


def late_left_out(proposals: Sequence[Proposal]) -> Proposal:
    """The second draft takes longer for one of its tokens, and is not waited for."""
    return merged(proposals[:1] if proposals[1].token_ids[0] == 0 else proposals)


def by_value(proposals: Sequence[Proposal]) -> Proposal:
    """The draft whose first token is likelier goes first."""

    def likelihood(proposal: Proposal) -> float:
        q = proposal.distributions[0]
        ids, values = np.frombuffer(q.token_ids, "<u4"), np.frombuffer(q.probabilities, "<f4")
        return float(values[ids.tolist().index(proposal.token_ids[0])])

    return merged(sorted(proposals, key=likelihood, reverse=True))


BUGS: dict[str, tuple[Strategy, Model, Merge, tuple[int, ...]]] = {
    "one try a node": (chains((A3, 1), (B3, 1)), P3, one_try_a_node, (1, 1)),
    "a cut by merged rows": (
        chains((Model(34, 4), 1), (Model(40, 4), 1), (Model(34, 4), 1)),
        Model(25, 4),
        cut_by_rows(2),
        (1, 1, 1),
    ),
    "a late draft left out": (chains((A3, 1), (B3, 1)), P3, late_left_out, (1, 1)),
    "drafts in order of what they drew": (chains((A3, 1), (B3, 1)), P3, by_value, (1, 1)),
}


@pytest.mark.planted
@pytest.mark.parametrize("bug", BUGS)
def test_catches(bug: str) -> None:
    strategy, p, merge, lengths = BUGS[bug]
    size = len(p(()))
    assert error(strategy, p, 2, sent(merged, *lengths, size=size)) == 0
    assert error(strategy, p, 2, sent(merge, *lengths, size=size)) > Fraction(1, 200)
