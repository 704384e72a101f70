"""Rejection and block mode through the simulated service: the tokens are distributed as the target's p.

Chi-square tests of every three tokens in a row of the first six against the toy model's exact probabilities:
the first comes without a proposal, the rest in rounds of up to three draft tokens. The seeds are fixed, so
the tests are deterministic; level 1e-4 is the chance that a correct system would have failed when they were
chosen. That the tests have power is shown by the planted bugs at the end.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from harness import chi_square
from harness.tiers import mostly_full

from coordinator.proposers.drafts import Drafts
from coordinator.round.steps import Steps
from coordinator.sequence.round_record import PROMPT_LOOKUP
from coordinator.sequence.stats import SpeculationStats
from paceline.core.config import NO_SUB_DRAFTER
from paceline.core.types import CHAIN, AcceptanceMode, Proposal, SamplingParams, SparseDistribution, TreeShape
from paceline.core.validation import AUTO, DraftTokens
from paceline.decoding import sparse_acceptance
from tests.sim.reference import invert
from tests.sim.toys import ToyModel
from tests.sim.world import Faults, Request, World

VOCAB = 4
TARGET = ToyModel(VOCAB, seed=11, sharpness=0.9)
DRAFTS = TARGET.near(0.7), TARGET.near(0.9, seed=2)
"""Draft workers of a world with several have them in turn."""
PROMPT = (2, 0, 1)
PAIRS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)
"""A prompt with every pair of tokens: whatever comes next, something followed it before."""
K = 3
LENGTH = 6
"""Tokens of a request: the first, and two rounds of proposals unless all of the first one's are accepted."""
TOGETHER = 3
"""Tokens whose joint distribution is looked at: more would leave too few of each outcome."""
N = 1600
LEVEL = 1e-4
STEP = 0.0096
"""Seconds of a slow draft's step: one is in time for a round, two are late."""
ARRIVALS = 0.1
"""Seconds over which the requests arrive."""


@functools.cache
def exact(prompt: tuple[int, ...]) -> list[dict[tuple[int, ...], float]]:
    """Entry i: the target's probability of every three tokens from the i-th on."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        paths = {
            (*path, token): so_far * float(p)
            for path, so_far in paths.items()
            for token, p in enumerate(TARGET.probabilities([*prompt, *path]))
        }
    places: list[dict[tuple[int, ...], float]] = [{} for _ in range(LENGTH - TOGETHER + 1)]
    for path, p in paths.items():
        for first, place in enumerate(places):
            outcome = path[first : first + TOGETHER]
            place[outcome] = place.get(outcome, 0.0) + p
    return places


def simulate(
    mode: AcceptanceMode,
    *,
    faults: str = "",
    n: int = N,
    first_seed: int = 0,
    k: DraftTokens = K,
    sources: tuple[str, ...] = (),
    draft_changes: Mapping[str, Any] | None = None,
    sub_drafter: str = NO_SUB_DRAFTER,
    tree: TreeShape = CHAIN,
    drafts: int = 1,
) -> World:
    guessing = sub_drafter != NO_SUB_DRAFTER
    events = [(ARRIVALS / 2, "draft gone")] if faults == "dies" else []
    if sources:
        events = [(0.0, "draft gone")]
    world = World(
        1,
        target=TARGET,
        draft=DRAFTS,
        num_drafts=drafts,
        target_blocks=n * 8,
        draft_blocks=n * 8 * (1 if tree.is_chain else 4),
        max_sequences=n,
        max_running=n,
        batch=4000,
        checks=False,
        faults=Faults(events=events, slowest=0.0004 if guessing else 0.002),
        sub_drafter=sub_drafter,
    )
    world.target_slowness = 1.0
    if guessing:
        world.draft_step = STEP, STEP
    if faults == "content":
        # Proposals are lost depending on what was drawn: the worst a faulty draft can do.
        world.drafts[0].worker.runner.crash_on = lambda ids: RuntimeError() if ids == [0] else None
    for i in range(n):
        sampling = SamplingParams(seed=first_seed + i, max_tokens=LENGTH, ignore_eos=True)
        world.submit(
            Request(
                f"s{i}",
                PAIRS if sources or guessing else PROMPT,
                sampling,
                mode,
                k=k,
                sources=sources,
                tree=tree,
                drafts=drafts,
                draft_changes=draft_changes or {},
                arrives=ARRIVALS * i / n,
                reads_every=0.01,
            )
        )
    world.run()
    return world


def p_value(world: World) -> float:
    """Of all places together: the least of their p-values, times their number (Bonferroni)."""
    (prompt,) = {client.request.prompt for client in world.clients}
    places = [p_value_from(world, first, want) for first, want in enumerate(exact(prompt))]
    return min(places) * len(places)


def p_value_from(world: World, first: int, want: Mapping[tuple[int, ...], float]) -> float:
    counts = Counter(tuple(client.token_ids[first : first + TOGETHER]) for client in world.clients)
    assert set(counts) <= set(want)
    expected = np.array([want[outcome] for outcome in want]) * len(world.clients)
    observed = np.array([counts[outcome] for outcome in want], dtype=float)
    small = expected < 5
    if small.any():
        expected = np.append(expected[~small], expected[small].sum())
        observed = np.append(observed[~small], observed[small].sum())
    return chi_square.p_value(observed, expected)


def stats_of(world: World) -> list[SpeculationStats]:
    return [client.running.state.stats for client in world.clients if client.running is not None]


def check_speculation(world: World) -> None:
    """Proposals of K tokens were judged to their ends, and sequences had several proposals."""
    full = [stats for stats in stats_of(world) if len(stats.reached) == K]
    assert sum(stats.reached[-1] for stats in full) > N / 40
    assert sum(stats.num_spec_steps > 1 for stats in stats_of(world)) > N / 20


@pytest.mark.parametrize("faults", mostly_full(["dies", "content", ""], count=2))
@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_first_tokens_have_the_targets_distribution(mode: AcceptanceMode, faults: str) -> None:
    world = simulate(
        mode, faults=faults, first_seed=10_000 * (len(faults) + 1) + (mode is AcceptanceMode.BLOCK)
    )
    counted = stats_of(world)
    drafted = sum(s.num_draft_tokens for s in counted)
    accepted = sum(s.num_accepted_draft_tokens for s in counted)
    assert drafted > N / 4
    assert 0.3 < accepted / drafted < 0.98, "both outcomes of a test must be frequent"
    check_speculation(world)
    assert p_value(world) > LEVEL


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_an_adaptive_k_keeps_the_distribution(mode: AcceptanceMode) -> None:
    world = simulate(mode, first_seed=70_000, k=AUTO)
    drafted = sum(s.num_draft_tokens for s in stats_of(world))
    assert drafted > N / 4
    assert p_value(world) > LEVEL


@pytest.mark.parametrize("mode", list(AcceptanceMode))
@pytest.mark.parametrize("source", mostly_full(["prompt-lookup", "suffix", "ngram"], count=1))
def test_context_sources_keep_the_distribution(mode: AcceptanceMode, source: str) -> None:
    world = simulate(mode, first_seed=90_000, sources=(source,))
    counted = stats_of(world)
    assert sum(s.by_source[source].num_rounds for s in counted) > N / 4
    accepted = sum(s.num_accepted_draft_tokens for s in counted)
    assert 0.1 < accepted / sum(sum(s.reached) for s in counted) < 0.9
    check_speculation(world)
    assert p_value(world) > LEVEL


@pytest.mark.parametrize("mode", list(AcceptanceMode))
@pytest.mark.parametrize(
    "changes",
    mostly_full([{"temperature": 1.6}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.7}], count=1),
)
def test_the_drafts_own_sampling_keeps_the_distribution(mode: AcceptanceMode, changes: Any) -> None:
    world = simulate(mode, first_seed=110_000, draft_changes=changes)
    check_speculation(world)
    assert p_value(world) > LEVEL


TREE = TreeShape(width=2, nodes=6)


def depths_judged(world: World) -> float:
    """Share of judged places at which a token was accepted."""
    counted = stats_of(world)
    return sum(s.num_accepted_draft_tokens for s in counted) / sum(sum(s.reached) for s in counted)


@pytest.mark.parametrize("mode", mostly_full([AcceptanceMode.REJECTION, AcceptanceMode.COUPLED], count=1))
@pytest.mark.parametrize(
    ("tree", "drafts", "faults"),
    mostly_full(
        [(CHAIN, 2, "dies"), (TREE, 2, ""), (TREE, 1, ""), (CHAIN, 3, ""), (TREE, 2, "dies")], count=2
    ),
)
def test_trees_of_one_and_several_drafts_keep_the_distribution(
    mode: AcceptanceMode, tree: TreeShape, drafts: int, faults: str
) -> None:
    """Three drafts have two models: one of them draws twice."""
    world = simulate(mode, first_seed=150_000 + drafts, tree=tree, drafts=drafts, faults=faults)
    assert 0.3 < depths_judged(world) < 0.98
    assert max(len(stats.histogram) for stats in stats_of(world)) == K + 1
    assert p_value(world) > LEVEL


@pytest.mark.planted
def test_choosing_among_drafts_by_what_they_drew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def greatest(proposals: Sequence[Proposal]) -> Proposal:
        return max(proposals, key=lambda proposal: proposal.token_ids[:1], default=Proposal())

    monkeypatch.setattr("coordinator.proposers.drafts.merged", greatest)
    assert p_value(simulate(AcceptanceMode.REJECTION, first_seed=150_000, drafts=3)) < LEVEL


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_late_hierarchical_drafts_keep_the_distribution(mode: AcceptanceMode) -> None:
    """How long a proposal takes depends on its tokens, and none is left out for being late."""
    world = simulate(mode, first_seed=130_000, sub_drafter="ngram")
    check_speculation(world)
    assert all(client.running.state.drafts[0].failures == 0 for client in world.clients if client.running)
    assert p_value(world) > LEVEL


@pytest.mark.planted
@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_leaving_out_late_hierarchical_drafts_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mode: AcceptanceMode
) -> None:
    monkeypatch.setattr(Drafts, "time_depends_on_draws", False)
    assert p_value(simulate(mode, n=2500, first_seed=130_000, sub_drafter="ngram")) < LEVEL


@pytest.mark.planted
def test_judging_a_copy_as_a_drawn_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the draw of a point mass; judged as that of a flat distribution it is accepted too often."""
    ids, flat = np.arange(VOCAB, dtype="<u4").tobytes(), np.full(VOCAB, 1 / VOCAB, dtype="<f4").tobytes()

    def spread(proposal: Proposal) -> list[SparseDistribution]:
        return [SparseDistribution(ids, flat)] * proposal.num_draft_tokens

    monkeypatch.setattr(sparse_acceptance, "_points", spread)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=1000, sources=(PROMPT_LOOKUP,))) < LEVEL


def test_coupled_mode_keeps_the_distribution() -> None:
    world = simulate(AcceptanceMode.COUPLED, faults="dies")
    check_speculation(world)
    assert p_value(world) > LEVEL


@pytest.mark.planted
def test_a_target_that_accepts_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sparse_acceptance.accept_rejection

    def greedy(chains: Any, p: Any, accept_u: Any, next_u: Any) -> Any:
        return real(chains, p, accept_u * 0, next_u)

    monkeypatch.setattr(sparse_acceptance, "accept_rejection", greedy)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=1000)) < LEVEL


@pytest.mark.planted
def test_a_last_draft_token_that_is_always_accepted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is reached only where those before it were accepted."""
    real = sparse_acceptance.accept_rejection

    def lenient(chains: Any, p: Any, accept_u: Any, next_u: Any) -> Any:
        return real(chains, p, accept_u * (np.arange(accept_u.shape[1]) < K - 1), next_u)

    monkeypatch.setattr(sparse_acceptance, "accept_rejection", lenient)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=1500)) < LEVEL


@pytest.mark.planted
def test_a_missing_correction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_p(chains: Any, p: Any, accepted: Any, scale: Any, next_u: Any) -> Any:
        rows = p[chains.first[:-1] + np.arange(len(accepted)) + accepted]
        return np.array([invert(row, u) for row, u in zip(rows, next_u, strict=True)])

    monkeypatch.setattr(sparse_acceptance, "next_tokens", from_p)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=1500)) < LEVEL


@pytest.mark.planted
def test_redrawing_proposals_until_they_suit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator drops proposals after it has seen their verdict."""
    real = Steps.on_verdict

    def choosy(self: Steps, event: Any, now: float) -> Any:
        state = self.state
        disliked = event.verdict.num_accepted == 0 and state.present.proposal.num_draft_tokens
        if disliked and state.target.answers(event, state.round):
            state.target.open = False
            return self.verify(Proposal(), now)
        return real(self, event, now)

    monkeypatch.setattr(Steps, "on_verdict", choosy)
    assert p_value(simulate(AcceptanceMode.REJECTION, n=2000)) < LEVEL
