"""Rejection and block mode through the simulated service: the tokens are distributed as the target's p.

A chi-square test of the first three tokens against the toy model's exact probabilities. The seeds are
fixed, so the tests are deterministic; level 1e-4 is the chance that a correct system would have failed
when they were chosen. That the tests have power is shown by the planted bugs at the end.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from harness import chi_square

from coordinator.round import RoundMachine
from paceline.core.checks import AUTO, DraftTokens
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SparseDistribution
from paceline.decoding import sparse_acceptance
from tests.sim.reference import invert
from tests.sim.toys import ToyModel
from tests.sim.world import Faults, Request, World

VOCAB = 4
TARGET = ToyModel(VOCAB, seed=11, sharpness=0.9)
DRAFT = TARGET.near(0.7)
PROMPT = (2, 0, 1)
PAIRS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)
"""A prompt with every pair of tokens: whatever comes next, something followed it before."""
N = 1600
LEVEL = 1e-4
ARRIVALS = 0.1
"""Seconds over which the requests arrive."""


@functools.cache
def exact(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """The target's probability of every first three tokens."""
    result = {}
    for tokens in itertools.product(range(VOCAB), repeat=3):
        p = 1.0
        for i, token in enumerate(tokens):
            p *= TARGET.probabilities([*prompt, *tokens[:i]])[token]
        result[tokens] = p
    return result


def simulate(
    mode: AcceptanceMode,
    *,
    faults: str = "",
    n: int = N,
    first_seed: int = 0,
    k: DraftTokens = 3,
    prompt_lookup: bool = False,
) -> World:
    events = [(ARRIVALS / 2, "draft gone")] if faults == "dies" else []
    if prompt_lookup:
        events = [(0.0, "draft gone")]
    world = World(
        1,
        target=TARGET,
        draft=DRAFT,
        target_blocks=n * 3,
        draft_blocks=n * 3,
        max_sequences=n,
        max_running=n,
        batch=4000,
        checks=False,
        faults=Faults(events=events),
    )
    world.target_slowness = 1.0
    if faults == "content":
        # Proposals are lost depending on what was drawn: the worst a faulty draft can do.
        world.drafts[0].worker.runner.crash_on = lambda ids: RuntimeError() if ids == [0] else None
    for i in range(n):
        sampling = SamplingParams(seed=first_seed + i, max_tokens=3, ignore_eos=True)
        world.submit(
            Request(
                f"s{i}",
                PAIRS if prompt_lookup else PROMPT,
                sampling,
                mode,
                k=k,
                prompt_lookup=prompt_lookup,
                arrives=ARRIVALS * i / n,
                reads_every=0.01,
            )
        )
    world.run()
    return world


def p_value(world: World) -> float:
    counts = Counter(tuple(client.token_ids) for client in world.clients)
    (prompt,) = {client.request.prompt for client in world.clients}
    want = exact(prompt)
    assert set(counts) <= set(want)
    expected = np.array([want[outcome] for outcome in want]) * len(world.clients)
    observed = np.array([counts[outcome] for outcome in want], dtype=float)
    small = expected < 5
    if small.any():
        expected = np.append(expected[~small], expected[small].sum())
        observed = np.append(observed[~small], observed[small].sum())
    return chi_square.p_value(observed, expected)


@pytest.mark.parametrize("faults", ["", "dies", "content"])
@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_the_first_tokens_are_distributed_as_the_target_would(mode: AcceptanceMode, faults: str) -> None:
    world = simulate(
        mode, faults=faults, first_seed=10_000 * (len(faults) + 1) + (mode is AcceptanceMode.BLOCK)
    )
    counted = [c.running.machine.stats for c in world.clients if c.running is not None]
    drafted = sum(s.num_draft_tokens for s in counted)
    accepted = sum(s.num_accepted_draft_tokens for s in counted)
    assert drafted > N / 4
    assert 0.3 < accepted / drafted < 0.98, "both outcomes of a test must be frequent"
    assert p_value(world) > LEVEL


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_nor_does_a_k_that_follows_from_what_was_accepted_change_them(mode: AcceptanceMode) -> None:
    world = simulate(mode, first_seed=70_000, k=AUTO)
    drafted = sum(c.running.machine.stats.num_draft_tokens for c in world.clients if c.running is not None)
    assert drafted > N / 4
    assert p_value(world) > LEVEL


@pytest.mark.parametrize("mode", list(AcceptanceMode))
def test_nor_does_copying_from_the_text(mode: AcceptanceMode) -> None:
    world = simulate(mode, first_seed=90_000, prompt_lookup=True)
    counted = [c.running.machine.stats for c in world.clients if c.running is not None]
    assert sum(s.num_prompt_lookups for s in counted) > N / 4
    accepted = sum(s.num_accepted_draft_tokens for s in counted)
    assert 0.1 < accepted / sum(s.num_draft_tokens for s in counted) < 0.9
    assert p_value(world) > LEVEL


def test_a_target_that_takes_a_copied_token_for_a_drawn_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the draw of a point mass; judged as that of a flat distribution it is accepted too often."""
    ids, flat = np.arange(VOCAB, dtype="<u4").tobytes(), np.full(VOCAB, 1 / VOCAB, dtype="<f4").tobytes()

    def spread(proposal: Proposal) -> list[SparseDistribution]:
        return [SparseDistribution(ids, flat)] * proposal.num_draft_tokens

    monkeypatch.setattr(sparse_acceptance, "_points", spread)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=1000, prompt_lookup=True)) < LEVEL


def test_coupled_mode_too() -> None:
    assert p_value(simulate(AcceptanceMode.COUPLED, faults="dies")) > LEVEL


def test_a_target_that_accepts_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sparse_acceptance.accept_rejection

    def greedy(chains: Any, p: Any, accept_u: Any, next_u: Any) -> Any:
        return real(chains, p, accept_u * 0, next_u)

    monkeypatch.setattr(sparse_acceptance, "accept_rejection", greedy)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=1000)) < LEVEL


def test_a_missing_correction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_p(chains: Any, p: Any, accepted: Any, scale: Any, next_u: Any) -> Any:
        rows = p[chains.first[:-1] + np.arange(len(accepted)) + accepted]
        return np.array([invert(row, u) for row, u in zip(rows, next_u, strict=True)])

    monkeypatch.setattr(sparse_acceptance, "next_tokens", from_p)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=3000)) < LEVEL


def test_a_proposal_that_is_asked_for_again_until_it_suits_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator that drops proposals it does not like, but only after it has seen the verdict."""
    real = RoundMachine._on_verdict

    def choosy(self: RoundMachine, event: Any, now: float) -> Any:
        disliked = event.verdict.num_accepted == 0 and self._proposal.num_draft_tokens
        if disliked and self._target.answers(event, self.round):
            self._target.open = False
            return self._verify(Proposal(), now)
        return real(self, event, now)

    monkeypatch.setattr(RoundMachine, "_on_verdict", choosy)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=3000)) < LEVEL
