"""Acceptance and drawing against slow loops written from the formulas, on random batches."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.decoding.acceptance import accept_block, accept_rejection
from paceline.decoding.coupled import coupled_choice
from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from paceline.decoding.sampling import dense_from_sparse, draw, to_sparse, truncate_support
from target_worker.acceptance.coupled import accept_coupled
from tests.unit.decoding.sparsely import sparse_block, sparse_rejection

SETTINGS = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**64 - 1)


def distributions(generator: torch.Generator, sharp: float, *shape: int) -> Tensor:
    """Random rows; a large `sharp` makes many entries vanish in float32."""
    return (torch.randn(*shape, generator=generator) * sharp).softmax(-1).double()


def slow_rejection(draft: list[int], p: Tensor, q: Tensor, tests: list[float]) -> int:
    for i, token in enumerate(draft):
        if not (q[i, token] > 0 and tests[i] < min(1.0, float(p[i, token] / q[i, token]))):
            return i
    return len(draft)


def slow_block(draft: list[int], p: Tensor, q: Tensor, tests: list[float]) -> int:
    accepted, pi = 0, 1.0
    for i, token in enumerate(draft, start=1):
        ratio = (
            float(p[i - 1, token] / q[i - 1, token]) if q[i - 1, token] > 0 else float(p[i - 1, token] > 0)
        )
        pi = min(1.0, pi * ratio)
        if i == len(draft):
            bound = pi
        else:
            residual = float((pi * p[i] - q[i]).clamp(min=0).sum())
            bound = residual / (residual + 1 - pi) if residual + 1 - pi > 0 else 1.0
        if tests[i - 1] <= bound:
            accepted = i
    return accepted


@SETTINGS
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    vocab=st.integers(1, 9),
    sharp=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_batched_acceptance_equals_slow_loops(
    seed: int, lengths: list[int], vocab: int, sharp: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, k = len(lengths), max(lengths)
    p = distributions(generator, sharp, size, k + 1, vocab)
    q = distributions(generator, sharp, size, k, vocab)
    noise = torch.rand(size, 2 * k + 1, dtype=torch.float64, generator=generator)
    draft = draw(q.reshape(-1, vocab), noise[:, :k].flatten()).reshape(size, k)
    tests, last = noise[:, k : 2 * k], noise[:, -1]
    for accept, slow in (
        (accept_rejection, slow_rejection),
        (accept_block, slow_block),
        (sparse_rejection, slow_rejection),
        (sparse_block, slow_block),
    ):
        decision = accept(draft, torch.tensor(lengths), p, q, tests, last)
        for s, n in enumerate(lengths):
            expected = slow(draft[s, :n].tolist(), p[s], q[s], tests[s].tolist())
            assert int(decision.num_accepted[s]) == expected
            assert bool(decision.is_bonus[s]) is (expected == n)
            assert p[s, expected, decision.next_token[s]] > 0
            assert decision.path[s].tolist() == [*range(expected), *[-1] * (k - expected)]


@SETTINGS
@given(seed=seeds, position=st.integers(0, 2**40), k=st.integers(0, 5), guess=st.integers(0, 2**31))
def test_coupled_tokens_do_not_depend_on_the_draft(seed: int, position: int, k: int, guess: int) -> None:
    """Drafter invariance: rounds of any drafts say what plain decoding with the same seed says."""
    vocab, length = 6, 8
    table = distributions(torch.Generator().manual_seed(5), 1.0, vocab, vocab).log()

    def own(previous: Tensor, at: int) -> Tensor:
        positions = range(at, at + len(previous))
        return coupled_choice(table[previous], [CoupledNoise(seed, position) for position in positions])

    plain = [0]
    while len(plain) <= length:
        plain.append(int(own(torch.tensor(plain[-1:]), position + len(plain))))
    said = [0]
    generator = torch.Generator().manual_seed(guess)
    while len(said) <= length:
        draft = torch.randint(0, vocab, (k,), generator=generator).tolist()
        choices = own(torch.tensor([said[-1], *draft]), position + len(said))
        accepted, token = accept_coupled(draft, choices.tolist())
        said += [*draft[:accepted], token]
    assert said[: length + 1] == plain[: length + 1]


@SETTINGS
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 60),
    sharp=st.floats(0, 40),
    u=st.floats(0, 1, exclude_max=True),
)
def test_draws_and_sparse_forms_stay_in_the_support(seed: int, vocab: int, sharp: float, u: float) -> None:
    q = distributions(torch.Generator().manual_seed(seed), sharp, 3, vocab)
    point = torch.full((3,), u, dtype=torch.float64)
    assert bool((q.gather(1, draw(q, point)[:, None]) > 0).all())
    ids, kept, lengths, mass = truncate_support(q, 0.9, bound=20)
    rebuilt = dense_from_sparse(to_sparse(ids, kept, lengths), vocab)
    drawn = ids.gather(1, draw(kept, point)[:, None])
    assert bool((rebuilt.gather(1, drawn) > 0).all())
    assert bool(((rebuilt > 0).sum(-1) <= lengths).all())
    assert bool((mass <= 1 + 1e-6).all())


@SETTINGS
@given(
    seed=seeds, position=st.integers(0, 2**63 - 1), purpose=st.sampled_from(Purpose), count=st.integers(0, 40)
)
def test_uniforms_lie_strictly_between_zero_and_one(
    seed: int, position: int, purpose: Purpose, count: int
) -> None:
    values = uniforms([seed], [position], purpose, count)
    assert values.shape == (1, count)
    assert bool(((values > 0) & (values < 1)).all())
    assert torch.equal(values, uniforms([seed], [position], purpose, count + 3)[:, :count])
