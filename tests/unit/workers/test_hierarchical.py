"""Hierarchical drafts: what guesses save, what wrong ones leave, and where there are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from harness.prompts import SOURCE

from draft_worker import sub_drafters
from draft_worker.drafters.model import ModelDrafter, load
from draft_worker.engine import DraftEngine
from draft_worker.sampling.draw import NoiseTape
from draft_worker.sampling.guesses import Guesses
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sub_drafters import SUB_DRAFTERS, sub_drafter_of
from paceline.core.clock import ManualClock
from paceline.core.config import NO_SUB_DRAFTER, DraftConfig
from paceline.core.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from paceline.core.messages import DraftProposal, DraftRound, OpenSequence, SequenceFailed
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.engine.cancel import CancelToken
from paceline.engine.loading.build import Built
from paceline.engine.multi_step import Chain, ChainInput
from tests.sim.reference import check_slow_proposal
from tests.unit.workers.test_draft_engine import MODEL, PROMPT, Worker, best, chaining

NAMES = [name for name in SUB_DRAFTERS if name != NO_SUB_DRAFTER]
SAMPLED = SamplingParams(seed=3)
Guess = Callable[[Sequence[int], int], Sequence[int]]


class Told:
    """A sub-drafter that guesses what a test tells it."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def guess(self, ledger: Sequence[int], drawn: Sequence[int], most: int) -> Sequence[int]:
        return self._guess([*ledger, *drawn], most)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[Guess], dict[str, str]]:
    """The setting of a worker with such a sub-drafter."""

    def setting(guess: Guess) -> dict[str, str]:
        monkeypatch.setitem(SUB_DRAFTERS, "told", lambda: Told(guess))
        return {"sub_drafter": "told"}

    return setting


def right(text: Sequence[int], most: int) -> Sequence[int]:
    return best(most, tuple(text))


def wrong(text: Sequence[int], most: int) -> Sequence[int]:
    return [(token + 1) % 6 for token in right(text, most)]


@pytest.mark.parametrize(
    ("guess", "passes"),
    [
        (right, [len(PROMPT) + 4]),
        (wrong, [len(PROMPT) + 4, 4, 3, 2, 1]),
        (lambda text, most: right(text, min(most, 2)), [len(PROMPT) + 2, 2]),
        (lambda text, most: [*right(text, most)[:1], *wrong(text, most)[1:]], [len(PROMPT) + 4, 3, 1]),
    ],
    ids=["right", "wrong", "short", "half right"],
)
def test_a_step_draws_a_token_more_for_each_right_guess(told: Any, guess: Guess, passes: list[int]) -> None:
    worker = Worker(**told(guess))
    worker.open()
    worker.ask(5)
    (event,) = worker.run()
    assert event.proposal.token_ids == best(5)
    assert worker.runner.passes == passes
    assert worker.cached() == [*PROMPT, *best(4)]
    assert event.num_computed_tokens == len(PROMPT) + 4


def test_a_round_without_a_guess_draws_a_chain(told: Any) -> None:
    chained = chaining(**told(lambda text, most: ()))
    chained.open()
    chained.ask(5)
    chained.run()
    calls: list[int] = []
    for worker, expected in ((chained, [4]), (chaining(**told(right)), [])):
        worker.open("t", (3, 2, 1))
        worker.ask(1, "t")
        worker.run()
        forward = worker.runner.forward_chains

        def counted(inputs: Any, cancel: Any = None, forward: Any = forward) -> Any:
            calls.extend(chain.steps for chain in inputs)
            return forward(inputs, cancel)

        worker.runner.forward_chains = counted  # type: ignore[method-assign]
        worker.ask(4, "t", number=2, base=4, tail=(0,))
        (event,) = worker.run()
        assert event.proposal.token_ids == best(4, (3, 2, 1, 0))
        assert calls == expected
        calls.clear()


def broken_at(told: Any, guess: Guess, mode: AcceptanceMode, prefix: Sequence[int]) -> tuple[Worker, Any]:
    worker = Worker(**told(guess))
    worker.open("s", PROMPT, SAMPLED, mode)
    worker.runner.spoil = lambda text: text == list(prefix)
    worker.ask(4)
    (event,) = worker.run()
    return worker, event


@pytest.mark.parametrize("mode", list(AcceptanceMode))
def test_nan_behind_a_wrong_guess_costs_nothing(told: Any, mode: AcceptanceMode) -> None:
    sound = broken_at(told, lambda text, most: (), mode, ())[1].proposal
    never = (sound.token_ids[0] + 1) % 6
    guess = lambda text, most: (never,) * most  # noqa: E731
    _, event = broken_at(told, guess, mode, [*PROMPT, never])
    assert event.proposal == sound


@pytest.mark.parametrize("mode", list(AcceptanceMode))
def test_nan_behind_a_right_guess_ends_the_proposal(told: Any, mode: AcceptanceMode) -> None:
    """Where the target judges by ratios, with what was drawn before."""
    sound: Proposal = broken_at(told, lambda text, most: (), mode, ())[1].proposal
    chain = sound.token_ids
    worker, event = broken_at(told, lambda text, most: chain[:3], mode, [*PROMPT, *chain[:2]])
    if mode is AcceptanceMode.COUPLED:
        assert isinstance(event, SequenceFailed)
        assert isinstance(event.error, InternalError)
    else:
        assert event.proposal == Proposal(chain[:2], distributions=sound.distributions[:2])
    worker.runner.spoil = lambda text: False
    worker.ask(3, number=2, base=4, tail=(5,))
    (again,) = worker.run()
    check_slow_proposal(MODEL, (*PROMPT, 5), SequenceParams(SAMPLED, mode, len(PROMPT)), again.proposal, 0.9)


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_a_lack_of_room_sends_what_is_drawn(told: Any, mode: AcceptanceMode) -> None:
    """How far a draft has come when room runs out depends on its tokens, if a sub-drafter guesses."""
    worker = Worker(num_blocks=2, **told(lambda text, most: ()))
    worker.open("a")
    worker.open("b", (3, 2, 1), SAMPLED, mode)
    worker.ask(3, "b")
    worker.ask(3, "a")
    events = {event.sequence_id: event for event in worker.run()}
    assert events["b"].proposal.num_draft_tokens == 2
    params = SequenceParams(SAMPLED, mode, 3)
    check_slow_proposal(MODEL, (3, 2, 1), params, events["b"].proposal, 0.9)
    assert worker.cached("b") == []
    worker.ask(3, "b", number=2, base=4, tail=(0,))
    (refused,) = worker.run()
    assert isinstance(refused.error, ResourceExhaustedError), "nothing was drawn"


def test_there_are_no_guesses_under_a_grammar() -> None:
    guesses, grammar = Guesses(lambda: Told(right)), object()
    for k, state, expected in ((4, None, 3), (4, grammar, 0), (1, None, 0)):
        params = SequenceParams(SAMPLED, AcceptanceMode.COUPLED, 1)
        draft = PartialDraft(params, PROMPT, k, NoiseTape(), grammar=state)  # type: ignore[arg-type]
        assert len(guesses.after("s", draft)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_ledger_that_shrinks_ends_nothing(name: str) -> None:
    """No coordinator takes back tokens; one that does so gets useless guesses."""
    worker = Worker(sub_drafter=name)
    text = (1, 2, 3, 1, 2) * 4
    worker.open("s", text)
    for number, (base, tail) in enumerate([(20, ()), (7, (2,)), (9, (1, 2))], 1):
        worker.ask(4, number=number, base=base, tail=tail)
        (event,) = worker.run()
        assert event.proposal.token_ids == best(4, (*text[: base - len(tail)], *tail))


@pytest.mark.parametrize("name", NAMES)
def test_a_guess_depends_on_the_text_alone(name: str) -> None:
    """Not on draft tokens of earlier calls, nor on how the text came to be."""
    rng = random.Random(name)
    text, old = rng.choices(range(4), k=5), SUB_DRAFTERS[name]()
    guessed = 0
    for _ in range(60):
        drawn, most = rng.choices(range(4), k=rng.randrange(4)), rng.randint(1, 6)
        guess = old.guess(text, drawn, most)
        assert list(guess) == list(SUB_DRAFTERS[name]().guess(text, drawn, most))
        assert len(guess) <= most
        guessed += len(guess)
        text += rng.choices(range(4), k=rng.randint(1, 3))
    assert guessed > 60


@pytest.mark.parametrize("name", NAMES)
def test_a_repetition_is_guessed_from_within(name: str) -> None:
    """A draft that leaves one copied place goes on at another."""
    text = (*range(10, 20), *range(30, 40), 10, 11, 12)
    guess = SUB_DRAFTERS[name]().guess
    assert list(guess(text, (), 4)) == [13, 14, 15, 16]
    assert list(guess(text, (30, 31), 3)) == [32, 33, 34]
    assert list(guess(text, (99,), 3)) == []


@pytest.mark.parametrize("name", ["embedded:draft", "model", "prompt_lookup", ""])
def test_an_unknown_sub_drafter_is_refused(name: str) -> None:
    """A model is none."""
    with pytest.raises(InvalidArgumentError, match="must be one of none, prompt-lookup, ngram") as refused:
        sub_drafter_of(DraftConfig(model="m", sub_drafter=name))
    assert refused.value.field == "sub_drafter"


def test_a_closed_sequence_leaves_no_guesses(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of the same name gets a sub-drafter of its own."""
    made: list[Told] = []

    def make() -> Told:
        made.append(Told(right))
        return made[-1]

    setting = told(right)
    monkeypatch.setitem(sub_drafters.SUB_DRAFTERS, "told", make)
    worker = Worker(**setting)
    for number in (1, 2):
        worker.open()
        worker.ask(3)
        worker.run()
        worker.ask(3, number=2, base=4, tail=(0,))
        worker.run()
        assert len(made) == number
        worker.it.drop("s")


# ---- the embedded draft ---------------------------------------------------------------------------------


@cache
def embedded() -> Built:
    return load(DraftConfig(model="embedded:draft", num_blocks=200, threads=1, device="cpu"))


class Counting(ModelDrafter):
    """Counts passes; a chain has one for each of its steps."""

    num_passes = 0

    def step(self, *feeds: Any, **how: Any) -> Any:
        self.num_passes += 1
        return super().step(*feeds, **how)

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        drawn = super().draw_chains(chains, cancel)
        self.num_passes += max(len(chain.token_ids) for chain in drawn)
        return drawn


@pytest.fixture
def drafts() -> Iterator[Callable[..., DraftEngine]]:
    """Makes engines of the embedded draft."""
    made: list[DraftEngine] = []

    def make(**changes: Any) -> DraftEngine:
        built = embedded()
        config = DraftConfig(
            model="embedded:draft", **{"prefix_cache": False, "lookahead_branches": 0} | changes
        )
        assert built.runner is not None
        drafter = Counting(built.runner, config, ManualClock())
        how = {"vocabulary_size": built.loaded.vocab_size, "max_model_len": built.max_model_len}
        made.append(DraftEngine(drafter, config, **how, clock=ManualClock()))
        return made[-1]

    yield make
    for engine in made:
        engine.drop("s")


def proposals(
    engine: DraftEngine, prompt: Sequence[int], params: SequenceParams, k: int, accepted: Sequence[int]
) -> list[Proposal]:
    """Of consecutive rounds; so many tokens of each are accepted, and followed by another one."""
    ledger, known, found = list(prompt), len(prompt), []
    engine.handle(OpenSequence("s", 1, tuple(prompt), params), 0.0)
    for number, taken in enumerate(accepted, 1):
        tail = tuple(ledger[known:])
        known = len(ledger)
        engine.handle(DraftRound("s", 1, number, known, tail, k), 0.0)
        events: list[Any] = []
        while not events:
            events += engine.step()
        (event,) = events
        assert isinstance(event, DraftProposal)
        found.append(event.proposal)
        drafted = event.proposal.token_ids
        ledger += [*drafted[:taken], drafted[taken] if taken < k else prompt[number]]
    engine.drop("s")
    return found


SAMPLINGS = [
    SamplingParams(temperature=0, seed=1),
    SamplingParams(seed=2),
    SamplingParams(temperature=0.7, seed=3, top_p=0.9, repetition_penalty=1.1),
]


def encoded(text: str) -> list[int]:
    tokenizer: Any = embedded().loaded.tokenizer
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("mode", list(AcceptanceMode))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("name", NAMES)
def test_the_embedded_draft_proposes_the_same_bits(
    drafts: Any, name: str, sampling: SamplingParams, mode: AcceptanceMode
) -> None:
    """Tokens and distributions, in every mode: its passes are row-invariant."""
    prompt = encoded(SOURCE)[:180]
    params = SequenceParams(sampling, mode, len(prompt))
    for k in (4, 16):
        accepted = k - 1, k, 1
        plain = proposals(drafts(), prompt, params, k, accepted)
        assert proposals(drafts(sub_drafter=name), prompt, params, k, accepted) == plain


@pytest.mark.parametrize("name", NAMES)
def test_repetitive_text_takes_fewer_passes(drafts: Any, name: str) -> None:
    prompt = encoded("assert x\n" * 20)
    params = SequenceParams(SAMPLINGS[0], AcceptanceMode.COUPLED, len(prompt))
    passes = []
    for changes in ({}, {"sub_drafter": name}):
        engine = drafts(**changes)
        proposals(engine, prompt, params, 8, (7, 7, 7, 7))
        passes.append(engine._drafter.num_passes)
    assert passes[0] >= 4 * 8
    assert passes[1] < 0.4 * passes[0], passes
