"""Exact losslessness of chain acceptance, by integrating the real functions over all that they consume.

The functions are piecewise constant in their uniforms. The harness finds the breakpoints by bisection on
the function itself, evaluates it inside every cell, and adds up the cells, so nothing is sampled and no
formula is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.decoding import acceptance, sparse_acceptance
from paceline.decoding.acceptance import Decision, accept_block, accept_rejection
from paceline.decoding.sampling import draw, point_mass
from paceline.decoding.sparse_acceptance import SparseChains
from target_worker.acceptance.coupled import accept_coupled
from tests.unit.decoding.sparsely import sparse_block, sparse_rejection

Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Decision]
Tables = list[Tensor]
"""Entry i: [V^i, V], the distribution after each prefix of i tokens (a number in base V)."""

LOW, HIGH = 2.0**-60, 1 - 2.0**-53


def bisect(outcome: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Where a monotone predicate of u in (0, 1) turns from true to false, elementwise."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(52):
        middle = (low + high) / 2
        holds = outcome(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return high


class Enumeration:
    """All chains of K tokens under q, all cells of the uniforms, and the output they give."""

    def __init__(self, accept: Accept, p: Tables, drawn: Tables, judged: Tables | None = None) -> None:
        self.accept, self.p = accept, p
        judged = judged or drawn
        self.vocab, self.k = p[0].shape[1], len(drawn)
        chains = torch.tensor(list(itertools.product(range(self.vocab), repeat=self.k)))
        chains = chains.reshape(-1, self.k)
        prefixes = torch.zeros(len(chains), self.k + 1, dtype=torch.int64)
        for i in range(self.k):
            prefixes[:, i + 1] = prefixes[:, i] * self.vocab + chains[:, i]
        weights = torch.ones(len(chains), dtype=torch.float64)
        for i in range(self.k):
            weights *= drawn[i][prefixes[:, i], chains[:, i]]
        kept = weights > 0
        self.chains, self.prefixes, self.weights = chains[kept], prefixes[kept], weights[kept]
        self.p_rows = torch.stack([p[i][self.prefixes[:, i]] for i in range(self.k + 1)], 1)
        self.q_rows = torch.stack([judged[i][self.prefixes[:, i]] for i in range(self.k)], 1)
        self._integrate()

    def _run(self, chain: Tensor, accept_u: Tensor, next_u: Tensor) -> Decision:
        lengths = torch.full((len(chain),), self.k)
        return self.accept(
            self.chains[chain], lengths, self.p_rows[chain], self.q_rows[chain], accept_u, next_u
        )

    def _breakpoints(self) -> Tensor:
        """[S, K]: the breakpoint of each accept uniform, found with all the others low or all high."""
        found = []
        chain = torch.arange(len(self.chains)).repeat_interleave(self.k)
        step = torch.arange(self.k).repeat(len(self.chains))
        half = torch.full((len(chain),), 0.5, dtype=torch.float64)
        for others in (LOW, HIGH):

            def accepted(u: Tensor, others: float = others) -> Tensor:
                tests = torch.full((len(chain), self.k), others, dtype=torch.float64)
                tests[torch.arange(len(chain)), step] = u
                return self._run(chain, tests, half).num_accepted

            first = accepted(torch.full_like(half, LOW))
            found.append(bisect(lambda u, a=accepted, f=first: a(u) == f, (len(chain),)))
        return torch.minimum(*found).reshape(-1, self.k)

    def _integrate(self) -> None:
        breaks = self._breakpoints()
        cells = torch.tensor(list(itertools.product((0, 1), repeat=self.k)), dtype=torch.bool)
        chain = torch.arange(len(self.chains)).repeat_interleave(len(cells))
        above = cells.repeat(len(self.chains), 1)
        edge = breaks[chain]
        width = torch.where(above, 1 - edge, edge).prod(1) * self.weights[chain]
        tests = torch.where(above, (1 + edge) / 2, edge / 2)
        chain, tests, width = chain[width > 0], tests[width > 0], width[width > 0]
        half = torch.full((len(chain),), 0.5, dtype=torch.float64)
        accepted = self._run(chain, tests, half).num_accepted

        tokens = torch.arange(self.vocab).repeat(len(chain))
        wide, wide_tests = chain.repeat_interleave(self.vocab), tests.repeat_interleave(self.vocab, 0)
        cumulative = bisect(
            lambda u: self._run(wide, wide_tests, u).next_token <= tokens, (len(tokens),)
        ).reshape(-1, self.vocab)
        mass = (
            torch.diff(cumulative, prepend=torch.zeros(len(chain), 1, dtype=torch.float64)) * width[:, None]
        )

        self.accepted = float((accepted * width).sum())
        ended = [torch.zeros(self.vocab ** (i + 1), dtype=torch.float64) for i in range(self.k + 1)]
        for i in range(self.k + 1):
            here = accepted == i
            index = self.prefixes[chain[here], i, None] * self.vocab + torch.arange(self.vocab)
            ended[i].index_add_(0, index.flatten(), mass[here].flatten())
        output = ended[0]
        for i in range(1, self.k + 1):
            output = (output[:, None] * self.p[i]).flatten() + ended[i]
        self.output = output

    @property
    def error(self) -> float:
        """Largest difference between the joint distribution of K+1 tokens and the target's."""
        plain = self.p[0][0]
        for table in self.p[1:]:
            plain = (plain[:, None] * table).flatten()
        return float((self.output - plain).abs().max())


def normal(table: Tensor) -> Tensor:
    return table / table.sum(-1, keepdim=True)


def random_tables(vocab: int, levels: int, seed: int, zeros: float = 0.0) -> Tables:
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for i in range(levels):
        table = torch.rand(vocab**i, vocab, dtype=torch.float64, generator=generator) ** 2 + 1e-3
        table *= torch.rand(vocab**i, vocab, generator=generator) >= zeros
        table[torch.arange(vocab**i), torch.arange(vocab**i) % vocab] += 1e-2
        tables.append(normal(table))
    return tables


def point_tables(vocab: int, levels: int, seed: int) -> Tables:
    return [point_mass(t.argmax(-1), vocab) for t in random_tables(vocab, levels, seed)]


def disjoint(vocab: int, levels: int) -> tuple[Tables, Tables]:
    left = [torch.zeros(vocab**i, vocab, dtype=torch.float64) for i in range(levels)]
    right = [t.clone() for t in left]
    for a, b in zip(left, right, strict=True):
        a[:, 0], b[:, 1:] = 1.0, 1.0
    return [normal(t) for t in left], [normal(t) for t in right]


def cases() -> list[tuple[str, Tables, Tables]]:
    """Name, p (K+1 levels) and q (K levels)."""
    made: list[tuple[str, Tables, Tables]] = []
    for vocab, k in ((2, 1), (2, 3), (3, 2), (3, 3), (4, 1)):
        p = random_tables(vocab, k + 1, 10 * vocab + k)
        made += [
            (f"dense-{vocab}-{k}", p, random_tables(vocab, k, 77)),
            (f"zeros-{vocab}-{k}", random_tables(vocab, k + 1, 5, 0.4), random_tables(vocab, k, 6, 0.4)),
            (f"point-q-{vocab}-{k}", p, point_tables(vocab, k, 78)),
        ]
    p = random_tables(3, 3, 1)
    made += [
        ("point-p", point_tables(3, 3, 3), random_tables(3, 2, 4)),
        ("both-points", point_tables(3, 3, 3), point_tables(3, 2, 4)),
        ("equal", p, p[:2]),
        ("equal-then-not", p, [p[0], random_tables(3, 2, 8)[1]]),
        ("disjoint", disjoint(3, 3)[0], disjoint(3, 2)[1]),
        ("disjoint-reversed", disjoint(3, 3)[1], disjoint(3, 2)[0]),
    ]
    return made


CASES = cases()
MODES = {
    "rejection": accept_rejection,
    "block": accept_block,
    "sparse rejection": sparse_rejection,
    "sparse block": sparse_block,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("p", "q"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_output_has_the_targets_distribution(mode: str, p: Tables, q: Tables) -> None:
    assert Enumeration(MODES[mode], p, q).error < 1e-9


@pytest.mark.parametrize("prefix", ["", "sparse "])
@pytest.mark.parametrize("seed", range(2))
def test_block_mode_accepts_at_least_as_many_as_rejection(seed: int, prefix: str) -> None:
    as_a_whole, one_by_one = MODES[prefix + "block"], MODES[prefix + "rejection"]
    p, q = random_tables(3, 4, seed), random_tables(3, 3, 100 + seed)
    block, token_by_token = Enumeration(as_a_whole, p, q), Enumeration(one_by_one, p, q)
    assert block.accepted > token_by_token.accepted
    # Of one draft token there is nothing to judge together.
    assert Enumeration(as_a_whole, p[:2], q[:1]).accepted == pytest.approx(
        Enumeration(one_by_one, p[:2], q[:1]).accepted
    )


@pytest.mark.parametrize("accept_rejection", [accept_rejection, sparse_rejection])
def test_a_draft_token_is_accepted_with_min_1_p_over_q(accept_rejection: Accept) -> None:
    """The first draft token is accepted with probability sum of min(p, q), each with min(1, p/q)."""
    p, q = random_tables(4, 2, 21), random_tables(4, 1, 22)
    enumeration = Enumeration(accept_rejection, p, q)
    assert enumeration.accepted == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=1e-12)
    for token in range(4):
        ratio = float(p[0][0, token] / q[0][0, token])
        for u, expected in ((ratio * 0.999, True), (ratio * 1.001, False)):
            if u >= 1:
                continue
            decision = accept_rejection(
                torch.tensor([[token]]),
                torch.tensor([1]),
                torch.stack([p[0], p[1][[token]]], 1),
                q[0][None],
                torch.tensor([[u]], dtype=torch.float64),
                torch.tensor([0.5], dtype=torch.float64),
            )
            assert bool(decision.num_accepted[0]) is expected
            assert bool(decision.is_bonus[0]) is expected
            if not expected:
                residual = (p[0] - q[0]).clamp(min=0)[0]
                assert residual[decision.next_token[0]] > 0


def test_greedy_acceptance_gives_the_plain_greedy_tokens() -> None:
    """Whatever is drafted, the output is the plain greedy continuation, token by token."""
    generator = torch.Generator().manual_seed(0)
    vocab, length = 5, 24
    logits = torch.randn(vocab, vocab, generator=generator)

    def target(token: int) -> int:
        return int(logits[token].argmax())

    for prompt in range(vocab):
        for wrong_in in (1, 2, 4):
            plain, spoken = [prompt], [prompt]
            while len(plain) < length:
                plain.append(target(plain[-1]))
            rounds = 0
            while len(spoken) < length:
                draft: list[int] = []
                for _ in range(3):
                    guess = target(([*spoken, *draft])[-1])
                    if int(torch.randint(wrong_in, (), generator=generator)) == 0:
                        guess = (guess + 1) % vocab
                    draft.append(guess)
                accepted, token = accept_coupled(draft, [target(t) for t in [spoken[-1], *draft]])
                spoken += [*draft[:accepted], token]
                rounds += 1
            assert spoken[:length] == plain
            assert rounds < length or wrong_in == 1


def test_coupled_output_is_the_targets_choice_for_any_draft() -> None:
    vocab, k = 3, 2
    for draft in itertools.product(range(vocab), repeat=k):
        for own in itertools.product(range(vocab), repeat=k + 1):
            for length in range(k + 1):
                n, token = accept_coupled(draft[:length], own[: length + 1])
                assert [*draft[:n], token] == list(own[: n + 1])
                assert n == length or draft[n] != own[n]


@pytest.mark.parametrize("mode", MODES)
def test_a_ragged_batch_decides_like_single_sequences(mode: str) -> None:
    accept = MODES[mode]
    generator = torch.Generator().manual_seed(3)
    vocab, k, size = 4, 3, 200

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    lengths = torch.randint(0, k + 1, (size,), generator=generator)
    draft = torch.randint(0, vocab, (size, k), generator=generator)
    p, q, tests, last = (
        normal(rand(size, k + 1, vocab)),
        normal(rand(size, k, vocab)),
        rand(size, k),
        rand(size),
    )
    for s, n in enumerate(lengths.tolist()):
        draft[s, n:], q[s, n:], p[s, n + 1 :], tests[s, n:] = -1, torch.nan, torch.nan, 0.0
    batch = accept(draft, lengths, p, q, tests, last)
    for s, n in enumerate(lengths.tolist()):
        one = slice(s, s + 1)
        alone = accept(draft[one, :n], lengths[one], p[one, : n + 1], q[one, :n], tests[one, :n], last[one])
        assert batch.path[s, :n].tolist() == alone.path[0].tolist()
        assert batch.path[s, n:].tolist() == [-1] * (k - n)
        assert batch.num_accepted[s] == alone.num_accepted[0]
        assert batch.next_token[s] == alone.next_token[0]
        assert batch.is_bonus[s] == alone.is_bonus[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [0.0, 0.1])
def test_a_final_draft_token_is_accepted_by_its_probability(mode: str, first: float) -> None:
    """The model gives no distribution after it, so the chain ends with it."""
    draft, two = torch.tensor([[0, 1]]), torch.tensor([2])
    rest = (1 - first) / 2
    p = torch.tensor([[[first, rest, rest], [torch.nan] * 3, [torch.nan] * 3]], dtype=torch.float64)
    q = torch.eye(3, dtype=torch.float64)[draft]
    for u in (0.05, 0.5, 0.999):
        verdict = MODES[mode](draft, two, p, q, torch.full((1, 2), u), torch.full((1,), 0.3))
        accepted = int(verdict.num_accepted[0])
        assert accepted == (u <= first)
        assert accepted or int(verdict.next_token[0]) == 1


# Planted mistakes: the harness must see each of them.

CAUGHT = 1e-3


@pytest.mark.planted
def test_catches_stopping_at_the_first_failure_in_block_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_tables(3, 4, 30), random_tables(3, 3, 31)
    assert Enumeration(accept_block, p, q).error < 1e-9
    monkeypatch.setattr(acceptance, "_largest", acceptance._leading)
    assert Enumeration(accept_block, p, q).error > CAUGHT


@pytest.mark.planted
def test_catches_softmax_q_for_an_argmax_draft() -> None:
    p, softmax = random_tables(3, 3, 32), random_tables(3, 2, 33)
    argmax = [point_mass(t.argmax(-1), 3) for t in softmax]
    for accept in MODES.values():
        assert Enumeration(accept, p, argmax, judged=argmax).error < 1e-9
        assert Enumeration(accept, p, argmax, judged=softmax).error > CAUGHT


@pytest.mark.planted
def test_catches_a_missing_correction_among_sparse_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next token is drawn from p after a rejection too."""
    real = sparse_acceptance.next_tokens

    def uncorrected(chains: SparseChains, p: Any, accepted: Any, scale: Any, next_u: Any) -> Any:
        """Chains without tokens: there is nothing but a bonus, from the row the correction would be of."""
        rows = p[chains.first[:-1] + np.arange(len(accepted)) + accepted]
        empty = replace(chains, first=np.zeros_like(chains.first))
        return real(empty, rows, np.zeros_like(accepted), scale, next_u)

    p, q = random_tables(3, 3, 36), random_tables(3, 2, 37)
    monkeypatch.setattr(sparse_acceptance, "next_tokens", uncorrected)
    for accept in (sparse_rejection, sparse_block):
        assert Enumeration(accept, p, q).error > CAUGHT


@pytest.mark.planted
def test_catches_a_residual_without_the_chains_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """In block mode the correction is drawn from norm(max(0, pi p - q)), not from norm(max(0, p - q))."""
    real = sparse_acceptance.next_tokens
    monkeypatch.setattr(
        sparse_acceptance,
        "next_tokens",
        lambda chains, p, accepted, scale, next_u: real(chains, p, accepted, 0 * scale + 1, next_u),
    )
    p, q = random_tables(3, 4, 38), random_tables(3, 3, 39)
    assert Enumeration(sparse_rejection, p, q).error < 1e-9
    assert Enumeration(sparse_block, p, q).error > CAUGHT


@pytest.mark.planted
def test_catches_sparse_tests_using_another_tokens_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sparse_acceptance._judged
    monkeypatch.setattr(
        sparse_acceptance,
        "_judged",
        lambda judge, chains, p, accept_u: real(judge, chains, p, accept_u[:, [0] * accept_u.shape[1]]),
    )
    p, q = random_tables(3, 3, 40), random_tables(3, 2, 41)
    for accept in (sparse_rejection, sparse_block):
        assert Enumeration(accept, p, q).error > CAUGHT


@pytest.mark.planted
def test_catches_a_missing_bonus() -> None:
    """After full acceptance the next token is drawn from p, not from the last row's residual."""

    def without_bonus(
        draft: Tensor, num_draft: Tensor, p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
    ) -> Decision:
        right = accept_rejection(draft, num_draft, p, q, accept_u, next_u)
        again = draw((p[:, -2] - q[:, -1]).clamp(min=0), next_u)
        token = torch.where(right.is_bonus, again, right.next_token)
        return Decision(right.path, right.num_accepted, token, right.is_bonus)

    p, q = random_tables(3, 3, 34), random_tables(3, 2, 35)
    assert Enumeration(without_bonus, p, q).error > CAUGHT


def simulate(shared: bool, size: int = 60_000) -> float:
    """Error of the first token's frequencies for K = 1, with or without noise shared between roles."""
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    noise = torch.rand(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draft = draw(q.expand(size, 3), noise[0])[:, None]
    tests = (noise[0] if shared else noise[1])[:, None]
    full = accept_rejection(
        draft,
        torch.ones(size, dtype=torch.int64),
        p.expand(size, 2, 3),
        q.expand(size, 1, 3),
        tests,
        noise[2],
    )
    first = torch.where(full.num_accepted > 0, draft[:, 0], full.next_token)
    return float((torch.bincount(first, minlength=3) / size - p).abs().max())


@pytest.mark.planted
def test_catches_noise_shared_by_draw_and_accept_test() -> None:
    assert simulate(shared=False) < 0.01
    assert simulate(shared=True) > 0.05


def two_rounds(fresh: bool, size: int = 100_000) -> float:
    """Error of the first two tokens' joint frequencies after two block rounds of K = 2.

    Noise keyed by the token's position meets the second round again; noise keyed by the round does not.
    """
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    q = torch.tensor([0.9, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    two = torch.full((size,), 2)

    def decide(draws: Tensor, tests: Tensor) -> tuple[Tensor, Tensor]:
        draft = torch.stack([draw(q.expand(size, 2), draws[:, i]) for i in range(2)], 1)
        verdict = accept_block(draft, two, p.expand(size, 3, 2), q.expand(size, 2, 2), tests, rand(size))
        n = verdict.num_accepted
        tokens = torch.cat([draft, torch.zeros(size, 1, dtype=torch.int64)], 1)
        return tokens.scatter(1, n[:, None], verdict.next_token[:, None]), n + 1

    draws, tests = rand(size, 5), rand(size, 5)
    first, length = decide(draws[:, :2], tests[:, :2])
    index = length[:, None] + torch.arange(2)
    if fresh:
        draws, tests = rand(size, 5), rand(size, 5)
    second, _ = decide(draws.gather(1, index), tests.gather(1, index))
    after = torch.where(length > 1, first[:, 1], second[:, 0])
    joint = torch.bincount(first[:, 0] * 2 + after, minlength=4) / size
    return float((joint - (p[:, None] * p).flatten()).abs().max())


@pytest.mark.planted
def test_catches_block_noise_reused_in_the_next_round() -> None:
    assert two_rounds(fresh=True) < 0.005
    assert two_rounds(fresh=False) > 0.02
