"""The target worker without sockets: results of a round, and failures of one sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    ResourceExhaustedError,
)
from paceline.core.messages import CloseSequence, OpenSequence, RoundVerdict, SequenceFailed, VerifyRound
from paceline.core.types import (
    AcceptanceMode,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from target_worker import engine
from target_worker.engine import TargetEngine
from tests.sim.reference import slow_verdict
from tests.sim.toys import ToyModel, ToyRunner, own_choice, target_config

VOCAB = 6
MODEL = ToyModel(VOCAB, seed=3)
PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0, seed=1)


class Worker:
    """An engine and short words for what is asked of it."""

    def __init__(
        self, num_blocks: int = 50, max_model_len: int = 60, eos: tuple[int, ...] = (), **config: Any
    ) -> None:
        self.clock = ManualClock()
        self.runner = ToyRunner(MODEL, num_blocks, 4)
        self.it = TargetEngine(
            self.runner,
            target_config(lease_seconds=10.0, **config),
            vocabulary_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=eos,
            clock=self.clock,
        )

    def open(
        self,
        name: str = "s",
        tokens: tuple[int, ...] = PROMPT,
        sampling: SamplingParams = GREEDY,
        mode: AcceptanceMode = AcceptanceMode.COUPLED,
        epoch: int = 1,
    ) -> list[Any]:
        return list(
            self.it.handle(
                OpenSequence(name, epoch, tokens, SequenceParams(sampling, mode, len(PROMPT))), 0.0
            )
        )

    def ask(
        self,
        proposal: Proposal | tuple[int, ...] = (),
        name: str = "s",
        number: int = 1,
        base: int = len(PROMPT),
        tail: tuple[int, ...] = (),
    ) -> list[Any]:
        chain = proposal if isinstance(proposal, Proposal) else Proposal(proposal)
        return list(self.it.handle(VerifyRound(name, 1, number, base, tail, chain), self.clock()))

    def run(self) -> list[Any]:
        events: list[Any] = []
        while self.it.has_work:
            events += self.it.step()
        return events

    def length(self, name: str = "s") -> int:
        held = self.it.sequences.find(name)
        assert held is not None
        assert self.runner.read(held.table) == held.session.cached
        return held.table.length


def failure(events: list[Any], name: str = "s") -> PacelineError:
    (event,) = events
    assert isinstance(event, SequenceFailed)
    assert event.sequence_id == name
    return event.error


def right(n: int, ledger: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """The next n tokens of greedy decoding."""
    tokens = list(ledger)
    for _ in range(n):
        tokens.append(own_choice(MODEL, tokens, GREEDY, len(PROMPT)))
    return tuple(tokens[len(ledger) :])


@pytest.mark.parametrize("accepted", range(5))
def test_a_round_can_produce_several_tokens(accepted: int) -> None:
    """The accepted draft tokens and the next one."""
    worker = Worker()
    worker.open()
    best = right(5)
    chain = [*best[:4]]
    if accepted < 4:
        chain[accepted] = (chain[accepted] + 1) % VOCAB
    worker.ask(tuple(chain))
    (event,) = worker.run()
    assert isinstance(event, RoundVerdict)
    assert event.verdict.num_accepted == accepted
    assert event.verdict.token_ids == best[: accepted + 1]
    # The next token has no entry, nor has anything that was rejected.
    assert event.verdict.num_computed_tokens == worker.length() == len(PROMPT) + accepted


def test_the_next_round_feeds_only_missing_entries() -> None:
    worker = Worker()
    worker.open()
    worker.ask(right(2))
    worker.run()
    worker.ask((0, 0), number=2, base=len(PROMPT) + 3)
    worker.run()
    assert worker.runner.passes == [len(PROMPT) + 2, 1 + 2]


@pytest.mark.parametrize("mode", AcceptanceMode)
@pytest.mark.parametrize("seed", range(10))
def test_every_mode_follows_its_formula_in_a_mixed_batch(mode: AcceptanceMode, seed: int) -> None:
    rng = np.random.default_rng(seed)
    worker = Worker()
    want = {}
    for i in range(4):
        sampling = SamplingParams(temperature=(0.0, 1.0, 0.7, 1.0)[i], seed=seed * 10 + i)
        this = mode if i < 3 else AcceptanceMode.COUPLED
        chain = tuple(int(t) for t in rng.integers(0, VOCAB, i + 1))
        q = rng.dirichlet(np.ones(VOCAB), len(chain)).astype("<f4")
        sparse = tuple(SparseDistribution(np.arange(VOCAB, dtype="<u4").tobytes(), r.tobytes()) for r in q)
        proposal = Proposal(chain, distributions=sparse if this is not AcceptanceMode.COUPLED else ())
        worker.open(f"s{i}", PROMPT, sampling, this)
        worker.ask(proposal, f"s{i}")
        params = SequenceParams(sampling, this, len(PROMPT))
        want[f"s{i}"] = slow_verdict(MODEL, PROMPT, params, proposal)
    got = {e.sequence_id: (e.verdict.num_accepted, e.verdict.token_ids[-1]) for e in worker.run()}
    assert got == want
    assert len(worker.runner.passes) == 1


def test_long_prompts_are_read_in_chunks_beside_rounds() -> None:
    worker = Worker(max_model_len=200)
    worker.open("long", tuple(i % VOCAB for i in range(90)))
    worker.open("short")
    worker.ask((), "long", base=90)
    worker.ask(right(2), "short")
    first = [event.sequence_id for event in worker.it.step()]
    assert first == []
    names = [event.sequence_id for event in worker.run()]
    assert sorted(names) == ["long", "short"]
    assert all(rows <= 40 for rows in worker.runner.passes)


@pytest.mark.parametrize("rows", [range(1), range(2, 3)])
def test_nan_logits_end_only_their_round(rows: range) -> None:
    worker = Worker()
    worker.open("bad")
    worker.open("good", (3, 2, 1))
    chain = right(3)
    worker.runner.spoil = lambda prefix: (
        tuple(prefix[: len(PROMPT)]) == PROMPT and len(prefix) - len(PROMPT) in rows
    )
    worker.ask(chain, "bad")
    worker.ask((0,), "good")
    bad, good = sorted(worker.run(), key=lambda event: event.sequence_id)
    assert isinstance(failure([bad], "bad"), InternalError)
    assert isinstance(good, RoundVerdict)
    assert worker.length("bad") == 0, "nothing that the pass computed is known to be numbers"
    worker.runner.spoil = lambda prefix: False
    worker.ask(chain, "bad")
    (event,) = worker.run()
    assert event.verdict.token_ids[:3] == chain, "the same round may be asked again"


def test_a_crash_ends_only_its_round() -> None:
    worker = Worker()
    worker.open("bad", (5, 5))
    worker.open("good")
    worker.runner.crash_on = lambda token_ids: RuntimeError() if token_ids[:2] == [5, 5] else None
    worker.ask((), "bad", base=2)
    worker.ask((), "good")
    events = {event.sequence_id: event for event in worker.run()}
    assert isinstance(events["bad"].error, InternalError)
    assert events["good"].verdict.token_ids == right(1)


def test_a_round_out_of_blocks_may_be_repeated() -> None:
    worker = Worker(num_blocks=2)
    worker.open("a")
    worker.open("b", (1,) * 8)
    worker.ask((), "a")
    worker.ask((), "b", base=8)
    events = {event.sequence_id: event for event in worker.run()}
    assert isinstance(events["b"].error, ResourceExhaustedError)
    assert worker.length("b") == 0
    worker.it.handle(CloseSequence("a", 1), 0.0)
    worker.ask((), "b", base=8)
    (event,) = worker.run()
    assert isinstance(event, RoundVerdict)


@pytest.mark.parametrize(
    ("proposal", "field"),
    [
        (Proposal((VOCAB,)), "proposal.token_ids"),
        (Proposal((1,) * 40, parents=tuple(range(-1, 39))), "proposal.parents"),
        (
            Proposal((1,), distributions=(SparseDistribution(b"\1\0\0\0", b"\0\0\x80?"),)),
            "proposal.distributions",
        ),
        (Proposal((1,) * 32), "proposal.token_ids"),
    ],
)
def test_an_invalid_proposal_is_refused_at_once(proposal: Proposal, field: str) -> None:
    worker = Worker(max_model_len=20)
    worker.open()
    error = failure(worker.ask(proposal))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert not worker.it.has_work
    assert worker.ask(right(1)) == [], "and its round number is still free"


def test_a_token_its_distribution_excludes_is_refused() -> None:
    worker = Worker()
    worker.open(sampling=SamplingParams(seed=1), mode=AcceptanceMode.REJECTION)
    other = SparseDistribution(b"\2\0\0\0", b"\0\0\x80?")
    error = failure(worker.ask(Proposal((1,), distributions=(other,))))
    assert isinstance(error, InvalidArgumentError)


@pytest.mark.parametrize(
    ("tokens", "sampling", "field"),
    [
        ((), GREEDY, "token_ids"),
        ((VOCAB,), GREEDY, "token_ids"),
        ((1,), SamplingParams(seed=1, logit_bias={VOCAB: 1.0}), "logit_bias"),
        ((1,), SamplingParams(seed=1, stop_token_ids=[VOCAB], min_tokens=2), "stop_token_ids"),
    ],
)
def test_a_sequence_that_cannot_be_sampled_is_refused(
    tokens: tuple[int, ...], sampling: SamplingParams, field: str
) -> None:
    """Ids beyond the vocabulary in logit_bias or stop_token_ids."""
    worker = Worker()
    error = failure(worker.open("s", tokens, sampling))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert not worker.it.holds("s")
    assert isinstance(failure(worker.ask()), NotFoundError)


def test_an_expired_lease_frees_blocks_unless_in_a_round() -> None:
    worker = Worker()
    for name in ("idle", "busy"):
        worker.open(name)
        worker.ask((), name)
    worker.run()
    worker.ask((0,), "busy", number=2, base=len(PROMPT) + 1)
    worker.clock.advance(10)
    worker.it.expire()
    assert (worker.it.holds("idle"), worker.it.holds("busy")) == (False, True)
    (event,) = worker.run()
    assert isinstance(event, RoundVerdict)
    worker.it.expire()
    assert worker.runner.pool.used_blocks == 0


def test_min_tokens_masks_the_models_end_tokens() -> None:
    first = right(1)[0]
    worker = Worker(eos=(first,))
    worker.open(sampling=SamplingParams(temperature=0, seed=1, min_tokens=2, max_tokens=5))
    worker.ask()
    (event,) = worker.run()
    assert event.verdict.token_ids[0] == int(np.argsort(-MODEL.logits(PROMPT))[1])


@pytest.mark.parametrize(("since", "rows"), [(0.0, 8), (1.0, 6), (3.0, 2), (4.0, 0)])
@pytest.mark.parametrize("scored", [False, True])
def test_a_round_arriving_in_a_device_pass_counts_prompt_rows(
    since: float, rows: int, scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is not over when it is launched."""
    monkeypatch.setattr("paceline.engine.scheduling.planner.SCORED_ROWS", 8)
    worker = Worker()
    prompt = PROMPT * (6 if scored else 3)
    sampling = replace(GREEDY, prompt_logprobs=0) if scored else GREEDY
    params = SequenceParams(sampling, AcceptanceMode.COUPLED, len(prompt))
    worker.it.handle(OpenSequence("long", 1, prompt, params), 0.0)
    worker.open("s")
    worker.ask(name="long", base=len(prompt))
    begun = worker.clock()
    looking = "prompt_logprobs" if scored else "verify_rounds"
    look = getattr(engine, looking)

    def looked(*args: Any) -> Any:
        worker.clock.advance(4.0)
        return look(*args)

    monkeypatch.setattr(engine, looking, looked)
    worker.it.step()
    round_of_s = VerifyRound("s", 1, 1, len(PROMPT), (), Proposal())
    worker.it.handle(round_of_s, begun + since)
    told = {e.sequence_id: e.verdict.timings for e in worker.run() if isinstance(e, RoundVerdict)}
    assert told["s"].prefill_rows_before == rows
