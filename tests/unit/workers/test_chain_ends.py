"""Draft tokens after which the model gives no distribution are as frequent as in plain decoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from harness.tiers import mostly_full

from paceline.core.errors import InternalError
from paceline.core.messages import (
    OpenSequence,
    PromptLogprobs,
    RoundVerdict,
    SequenceFailed,
    TargetEvent,
    VerifyRound,
)
from paceline.core.structured import StructuredOutputs
from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from target_worker import verify
from target_worker.acceptance import ratios
from target_worker.acceptance.items import VerifyItem
from target_worker.engine import TargetEngine
from target_worker.verify import NO_CHOICE, verify_items
from tests.sim.toys import ToyModel, target_config
from tests.unit.grammar.tiny import TOKENS
from tests.unit.workers.test_broken_token import POISON, PROMPT, VOCAB, BreakingRunner, check_broken
from tests.unit.workers.test_structured_outputs import PROMPT as GRAMMAR_PROMPT
from tests.unit.workers.test_structured_outputs import N, Pair

END, ON, OTHER, START, NEVER = range(5)
"""Behind END there is nothing; NEVER is what no request permits."""
P = {START: (0.5, 0.25, 0.25), ON: (0.25, 0.25, 0.5), OTHER: (0.125, 0.625, 0.25)}
"""What comes after a token: END, ON, OTHER."""
Q = ((0.25, 0.5, 0.25), (0.5, 0.125, 0.375))
"""What the first draft token is drawn from, and the second."""
COUNT = 1000
CHI_SQUARE = 40.0
"""By chance it is more than this once in 2.2 million times, of 6 degrees of freedom (seven outcomes)."""
RATIOS = [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK]


NOTHING: dict[str, tuple[float, ...]] = {
    "no numbers": (math.nan,) * 5,
    "no numbers in its whole pass": (math.nan,) * 5,
    "infinity, of what is forbidden": (0.0, 9.0, 0.0, 0.0, math.inf),
    "all impossible": (-math.inf,) * 5,
    "all impossible that is permitted": (-math.inf, -math.inf, -math.inf, -math.inf, 0.0),
}
"""Logits behind END."""


class LastToken(ToyModel):
    """What follows depends on the last token alone."""

    def __init__(self, nothing: str, first: Sequence[float]) -> None:
        super().__init__(5)
        self.first = first
        self.after = np.full((5, 5), -np.inf, dtype=np.float32)
        with np.errstate(divide="ignore"):
            for token, weights in (P | {START: first}).items():
                self.after[token, :3] = np.log(weights)
        self.after[:, NEVER] = 0.0
        self.after[END] = NOTHING[nothing]

    def rows(self, prefix: Sequence[int], count: int) -> np.ndarray:
        return self.after[list(prefix[len(prefix) - count :])]


def sent(weights: Sequence[float]) -> SparseDistribution:
    """Of what has any weight."""
    ids = np.flatnonzero(weights)
    return SparseDistribution(ids.astype("<u4").tobytes(), np.array(weights, "<f4")[ids].tobytes())


def params_of(seed: int, mode: AcceptanceMode) -> SequenceParams:
    sampling = SamplingParams(seed=seed, allowed_token_ids=(END, ON, OTHER), logprobs=0)
    return SequenceParams(sampling, mode, 1)


class Many:
    """Sequences that share their passes, each with a ledger."""

    def __init__(self, mode: AcceptanceMode, nothing: str, first: Sequence[float] = P[START]) -> None:
        config = target_config(max_batch_tokens=4 * COUNT, max_sequences=COUNT, prefix_cache=False)
        self.model = LastToken(nothing, first)
        spoilt = END if "pass" in nothing else -1
        runner = BreakingRunner(self.model, num_blocks=2 * COUNT, poison=spoilt)
        self.it = TargetEngine(runner, config, vocabulary_size=5, max_model_len=8)
        self.ledgers = {f"s{i}": [START] for i in range(COUNT)}
        for i, name in enumerate(self.ledgers):
            assert not self.it.handle(OpenSequence(name, 1, (START,), params_of(i, mode)), 0.0)

    def judge(self, number: int, proposals: dict[str, Proposal]) -> list[str]:
        """Those that failed; what the others have got is in their ledgers, and reported rightly."""
        for name, proposal in proposals.items():
            base = len(self.ledgers[name])
            assert not self.it.handle(VerifyRound(name, 1, number, base, (), proposal), 0.0)
        failed = []
        events: list[TargetEvent] = []
        while self.it.has_work:
            events += self.it.step()
        for event in events:
            ledger = self.ledgers[event.sequence_id]
            if isinstance(event, SequenceFailed):
                assert isinstance(event.error, InternalError)
                assert event.error.message == NO_CHOICE
                failed.append(event.sequence_id)
                continue
            assert isinstance(event, RoundVerdict)
            for token, told in zip(event.verdict.token_ids, event.verdict.logprobs, strict=True):
                row = torch.from_numpy(self.model.after[ledger[-1]])
                assert (told.token_id, told.logprob) == (
                    token,
                    pytest.approx(float(row.log_softmax(-1)[token])),
                )
                ledger.append(token)
        return failed


def drawn(k: int) -> list[Proposal]:
    """Chains of k tokens from Q, which goes on behind END as any draft may."""
    rng, distributions = np.random.default_rng(k), tuple(map(sent, Q[:k]))
    chains = zip(*(rng.choice(3, COUNT, p=weights).tolist() for weights in Q[:k]), strict=True)
    return [Proposal(tokens, (), distributions) for tokens in chains]


def check_as_plain_decoding(many: Many, proposals: list[Proposal]) -> None:
    """The texts up to END or two tokens have the distribution of plain decoding, and those with END fail."""
    names, first = list(many.ledgers), many.model.first
    assert many.judge(1, dict(zip(names, proposals, strict=True))) == [], (
        "its first token can always be drawn"
    )
    failed: set[str] = set()
    for number in (2, 3, 4):
        going = [n for n in names if n not in failed and len(many.ledgers[n]) < 4]
        failed.update(many.judge(number, dict.fromkeys(going, Proposal())))
    texts = {name: ledger[1:] for name, ledger in many.ledgers.items()}
    for name, text in texts.items():
        # In plain decoding, too, END comes, and then the next round fails.
        assert END not in text[:-1]
        assert (name in failed) == (text[-1] == END and len(text) < 3)
    expected = {(END,): first[END]}
    expected |= {(a, b): first[a] * P[a][b] for a in (ON, OTHER) for b in range(3)}
    expected = {text: weight for text, weight in expected.items() if weight}
    found = Counter(tuple(text[: 1 if text[0] == END else 2]) for text in texts.values())
    assert found.keys() <= expected.keys()
    assert sum((found[t] - COUNT * w) ** 2 / (COUNT * w) for t, w in expected.items()) < CHI_SQUARE


@pytest.fixture(params=["cpu", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Judged by sparse numbers, and in tensors as where looking at a number waits for a device."""
    if request.param == "device":
        for module in (verify, ratios):
            monkeypatch.setattr(module, "on_host", lambda tensor: False)
    return str(request.param)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("k", mostly_full([2, 1], count=1))
@pytest.mark.parametrize("mode", RATIOS)
def test_a_final_token_is_as_frequent_as_in_plain_decoding(
    mode: AcceptanceMode, k: int, nothing: str
) -> None:
    """A row of NaN after an accepted chain must not void the round."""
    check_as_plain_decoding(Many(mode, nothing), drawn(k))


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("mode", RATIOS)
def test_a_breaking_token_that_is_never_drawn_fails_nothing(mode: AcceptanceMode, nothing: str) -> None:
    proposals = [one if i % 2 else Proposal((END, ON)) for i, one in enumerate(drawn(2))]
    check_as_plain_decoding(Many(mode, nothing, first=(0.0, 0.5, 0.5)), proposals)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("mode", AcceptanceMode)
def test_a_chosen_dead_end_gives_no_verdict(mode: AcceptanceMode) -> None:
    """The round is repeated without draft tokens, with the same result."""
    logits = torch.zeros(2, 5)
    logits[0, END], logits[1, :NEVER] = 40.0, -math.inf
    verdict = None if mode is AcceptanceMode.COUPLED else Outcome(0, END)
    for proposal in (Proposal((END,)), Proposal((END,), (), (sent((0.5, 0.5)),))):
        if proposal.distributions and mode is AcceptanceMode.COUPLED:
            continue
        assert verify_items([VerifyItem(params_of(1, mode), (START,), proposal)], logits, logits) == [verdict]


# ---- one sequence, and what belongs to it ---------------------------------------------------------


class One:
    """A worker that a token breaks, and its sequences."""

    def __init__(self, **config: Any) -> None:
        self.runner = BreakingRunner()
        self.it = TargetEngine(self.runner, target_config(**config), vocabulary_size=VOCAB, max_model_len=60)

    def open(self, name: str, tokens: Sequence[int], **sampling: Any) -> None:
        params = SequenceParams(SamplingParams(**{"seed": 1} | sampling), AcceptanceMode.BLOCK, len(tokens))
        assert not self.it.handle(OpenSequence(name, 1, tuple(tokens), params), 0.0)

    def run(self) -> list[TargetEvent]:
        events: list[TargetEvent] = []
        while self.it._rounds:
            events += self.it.step()
        return events

    def ask(self, name: str, number: int, base: int, *proposed: int) -> list[TargetEvent]:
        events = self.it.handle(VerifyRound(name, 1, number, base, (), Proposal(proposed)), 0.0)
        return [*events, *self.run()]


def tokens_of(event: TargetEvent) -> tuple[int, ...]:
    assert isinstance(event, RoundVerdict), event
    return event.verdict.token_ids


SURE = {"logit_bias": {2: 60.0}}
"""2 comes, whatever was before."""


@pytest.mark.parametrize("before", [True, False], ids=["its first row is known", "it is not"])
def test_a_broken_pass_leaves_nothing(before: bool) -> None:
    one = One(pre_verify=before)
    one.runner.cancellable = before
    one.open("s", PROMPT, **SURE)
    (told,) = one.ask("s", 1, len(PROMPT))
    assert tokens_of(told) == (2,)
    if before:
        one.it.step()
        assert one.it._precomputed._rows
    (told,) = one.ask("s", 2, len(PROMPT) + 1, 2, 2, POISON, 2)
    assert tokens_of(told) == (2, 2, 2)
    held = one.it.sequences.find("s")
    assert held is not None
    assert one.runner.read(held.table) == [*PROMPT, 2, 2, 2]
    assert held.state.finite_length == held.table.length
    (told,) = one.ask("s", 3, len(PROMPT) + 4, 2)
    assert tokens_of(told)[0] == 2


def test_a_sequence_with_cached_entries_is_judged_alike() -> None:
    one, prompt = One(), [i % POISON for i in range(20)]
    one.open("s", prompt, **SURE)
    assert tokens_of(one.ask("s", 1, len(prompt))[0]) == (2,)
    one.open("t", prompt, **SURE)
    (told,) = one.ask("t", 1, len(prompt), 2, POISON)
    assert tokens_of(told) == (2, 2)
    assert one.it.sequences.prefix_index is not None
    assert one.it.sequences.prefix_index.hits > 0
    one.open("u", [*prompt, POISON], **SURE)
    check_broken(*one.ask("u", 1, len(prompt) + 1, 2, 2))


def test_a_round_broken_without_its_draft_fails() -> None:
    one = One()
    one.open("s", [*PROMPT, POISON], **SURE)
    check_broken(*one.ask("s", 1, len(PROMPT) + 1, 2, 2))
    one.open("t", PROMPT, **SURE)
    assert tokens_of(one.ask("t", 1, len(PROMPT), 2)[0])[0] == 2


def test_a_prompt_is_reported_once() -> None:
    one = One()
    one.runner.poison = -1
    one.runner.spoil = lambda prefix: prefix[-1] == POISON
    one.open("s", PROMPT, prompt_logprobs=0, **SURE)
    *reports, told = one.ask("s", 1, len(PROMPT), 2, POISON)
    assert tokens_of(told) == (2, 2)
    assert all(isinstance(report, PromptLogprobs) for report in reports)
    assert sum(len(report.logprobs) for report in reports) == len(PROMPT) - 1  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", RATIOS)
def test_the_grammar_still_applies_after_a_broken_pass(mode: AcceptanceMode) -> None:
    """Without draft tokens "b" comes, then "a"; the model breaks on "b", or on "a" behind it."""
    a, b = TOKENS.index("a"), TOKENS.index("b")
    structure = StructuredOutputs(regex="ba|bb")
    for last, expected in ((b, (b,)), (a, (b, a))):
        bias = {a: 90.0, b: 50.0}
        pair = Pair(SamplingParams(structured_outputs=structure, logit_bias=bias, seed=2), mode)
        pair.target._runner.spoil = lambda prefix, last=last: prefix[N:][-1:] == [last]  # type: ignore[attr-defined]
        assert not pair.target.handle(VerifyRound("s", 1, 1, N, GRAMMAR_PROMPT, Proposal((b, a, b))), 0.0)
        events: list[TargetEvent] = []
        while not events:
            events = pair.target.step()
        assert tokens_of(events[0]) == expected
