"""A scorer of texts as a drafter: it proposes what a model with the same scores does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draft_worker.drafters.tokens import FixedScorer, Row, TokenDrafter
from draft_worker.engine import DraftEngine
from paceline.core.clock import ManualClock
from paceline.core.config import DraftConfig
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    SequenceFailed,
)
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams, TreeShape
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine

VOCAB = 6
MODEL = ToyModel(VOCAB, seed=4)
PROMPT = (1, 2, 3, 1)
K = 3
BROKEN = 5


class Scorer(FixedScorer):
    """The model's scores."""

    def score(self, text: Sequence[int], row: Row) -> None:
        row[:] = MODEL.logits(text)


class SomeTexts(Scorer):
    """None of a text with this token."""

    def score(self, text: Sequence[int], row: Row) -> None:
        super().score(text, row)
        if BROKEN in text:
            row[:] = np.nan


def engines(config: DraftConfig) -> tuple[DraftEngine, DraftEngine]:
    """Of the scorer, and of a model with its scores."""
    clock = ManualClock()
    common: dict[str, Any] = {"vocabulary_size": VOCAB, "max_model_len": 400}
    of_tokens = DraftEngine(TokenDrafter(Scorer, VOCAB, config, clock), config, clock=clock, **common)
    return of_tokens, draft_engine(ToyRunner(MODEL, num_blocks=400), config, clock=clock, **common)


def run(engine: DraftEngine) -> list[Any]:
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    return events


def told(events: Sequence[Any]) -> list[Any]:
    """What events say besides times."""
    return [
        (event.proposal, event.num_computed_tokens) if isinstance(event, DraftProposal) else event.proposals
        for event in events
    ]


@pytest.mark.parametrize("branches", [0, 8])
@pytest.mark.parametrize("mode", AcceptanceMode)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_scores_give_equal_proposals(temperature: float, mode: AcceptanceMode, branches: int) -> None:
    """Through verdicts of all lengths, with hits and misses of branches."""
    rng, ledger = random.Random(3), list(PROMPT)
    of_tokens, of_model = engines(draft_config(lookahead_branches=branches))
    both = (of_tokens, of_model)
    params = SequenceParams(SamplingParams(temperature=temperature, seed=7), mode, len(PROMPT))
    for engine in both:
        assert not engine.handle(OpenSequence("s", 1, PROMPT, params), 0.0)
    tail: tuple[int, ...] = ()
    for number in range(1, 30):
        command = DraftRound("s", 1, number, len(ledger), tail, K)
        events = [[*engine.handle(command, 0.0), *run(engine)] for engine in both]
        assert told(events[0]) == told(events[1])
        (proposal,) = [event.proposal for event in events[0] if isinstance(event, DraftProposal)]
        continuations = [outcome for event in events[0][1:] for outcome in event.proposals]
        accepted, token = rng.randrange(K + 1), rng.randrange(VOCAB)
        if continuations and number % 3:
            accepted, token, _ = rng.choice(continuations)
        tail = (*proposal.token_ids[:accepted], token)
        ledger += tail
    assert of_tokens.lookahead.hits == of_model.lookahead.hits
    assert bool(branches and mode is AcceptanceMode.COUPLED) <= bool(of_tokens.lookahead.hits)
    for engine in both:
        engine.handle(CloseSequence("s", 1), 0.0)
        assert not engine.has_work
        assert not engine.lookahead.regions


def test_a_text_without_scores_fails_its_sequence_only() -> None:
    config, clock = draft_config(), ManualClock()
    engine = DraftEngine(
        TokenDrafter(SomeTexts, VOCAB, config, clock),
        config,
        vocabulary_size=VOCAB,
        max_model_len=99,
        clock=clock,
    )
    params = SequenceParams(SamplingParams(temperature=0.0, seed=7), AcceptanceMode.COUPLED, 2)
    for name, prompt in (("well", (1, 2)), ("bad", (1, BROKEN))):
        engine.handle(OpenSequence(name, 1, prompt, params), 0.0)
        engine.handle(DraftRound(name, 1, 1, 2, (), K), 0.0)
    events = {event.sequence_id: event for event in run(engine)}
    assert isinstance(events["bad"], SequenceFailed)
    assert events["well"].proposal.num_draft_tokens == K


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.REJECTION])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_scores_give_equal_trees(temperature: float, mode: AcceptanceMode) -> None:
    """Through verdicts that end anywhere in the tree, foreseen ones among them."""
    rng, ledger = random.Random(3), list(PROMPT)
    both = of_tokens, of_model = engines(draft_config(lookahead_branches=8))
    params = SequenceParams(SamplingParams(temperature=temperature, seed=7), mode, len(PROMPT))
    for engine in both:
        assert not engine.handle(OpenSequence("s", 1, PROMPT, params), 0.0)
    for number in range(1, 25):
        shape = TreeShape(2, 5)
        command = DraftRound("s", 1, number, len(ledger), tuple(ledger), K, shape=shape)
        events = [[*engine.handle(command, 0.0), *run(engine)] for engine in both]
        assert told(events[0]) == told(events[1])
        tree = next(event.proposal for event in events[0] if isinstance(event, DraftProposal))
        foreseen = [key for event in events[0] if isinstance(event, Continuations) for key in event.proposals]
        node = rng.randrange(-1, tree.num_draft_tokens)
        verdict = [*(tree.token_ids[i] for i in tree.path_to(node)), rng.randrange(VOCAB)]
        if foreseen and number % 2:
            outcome = rng.choice(foreseen)
            verdict = [*tree.accepted(outcome), outcome.next_token]
        ledger += verdict
    assert of_tokens.lookahead.hits == of_model.lookahead.hits
    assert bool(of_model.lookahead.hits) == (mode is AcceptanceMode.COUPLED or temperature == 0)
