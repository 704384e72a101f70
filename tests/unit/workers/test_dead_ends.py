"""Draft tokens that lead a grammar to a dead end are as frequent as in plain decoding, and fail alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import OpenSequence, RoundVerdict, SequenceFailed, VerifyRound
from paceline.core.structured import StructuredOutputs
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams, SparseDistribution
from tests.unit.grammar.tiny import END, TOKENS
from tests.unit.workers.test_structured_outputs import PROMPT, TARGET, N, Pair

A, B = TOKENS.index("a"), TOKENS.index("b")
DEAD_END = StructuredOutputs(regex="(ab|bx)")
"""Behind "b" only a letter may come that no token has."""


def towards_a_dead_end(seed: int = 1, **of: Any) -> SamplingParams:
    """Of what the grammar allows first, "a" and "b" are as likely as each other, and nothing else comes."""
    logits = TARGET.logits(PROMPT)
    bias = {token: 40.0 - float(logits[token]) for token in (A, B)}
    return SamplingParams(**({"structured_outputs": DEAD_END, "seed": seed, "logit_bias": bias} | of))


def drawn_from(**weights: float) -> SparseDistribution:
    ids = sorted(TOKENS.index(token) for token in weights)
    probabilities = [weights[TOKENS[token]] for token in ids]
    return SparseDistribution(np.array(ids, "<u4").tobytes(), np.array(probabilities, "<f4").tobytes())


@pytest.mark.parametrize("k", [1, 2])
def test_a_wrong_proposal_into_a_dead_end_costs_nothing(k: int) -> None:
    pair = Pair(towards_a_dead_end(temperature=0, logit_bias={A: 50.0}))
    pair.round = 1
    pair.judge(Proposal((B, B)[:k]))
    assert pair.run(0) == [A, B, END]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_a_dead_end_is_as_frequent_as_the_target_draws_it(mode: AcceptanceMode, k: int) -> None:
    """A quarter of the proposals begins with "a", and half of the texts. A round repeated without its
    proposal draws once more where that leads to a dead end."""
    count = 240
    pair = Pair(towards_a_dead_end())
    q = (drawn_from(a=0.25, b=0.75), drawn_from(b=1.0))[:k]
    first: list[int] = []
    for i in range(count):
        params = SequenceParams(towards_a_dead_end(seed=i), mode, N)
        assert not pair.target.handle(OpenSequence(f"s{i}", 1, PROMPT, params), 0.0)
        proposal = Proposal((A if i % 4 == 0 else B, B)[:k], (), q)
        assert not pair.target.handle(VerifyRound(f"s{i}", 1, 1, N, PROMPT, proposal), 0.0)
        (told,) = pair.target.step()
        assert isinstance(told, RoundVerdict)
        first.append(told.verdict.token_ids[0])
        pair.target.drop(f"s{i}")
    assert set(first) == {A, B}
    # Of 180 times "b" a third is refused: 120 times "a", with a standard deviation of 6.
    assert abs(first.count(A) - count / 2) < 25


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("mode", AcceptanceMode)
def test_an_accepted_dead_end_fails_as_in_plain_decoding(mode: AcceptanceMode, k: int) -> None:
    """Its token is emitted with its log-probability; the next round fails."""
    pair = Pair(towards_a_dead_end(logit_bias={B: 60.0}, logprobs=0, temperature=0.5), mode)
    proposal = Proposal((B, A)[:k])
    assert not pair.target.handle(VerifyRound("s", 1, 1, N, PROMPT, proposal), 0.0)
    (told,) = pair.target.step()
    assert isinstance(told, RoundVerdict)
    assert (told.verdict.num_accepted, told.verdict.token_ids) == (0, (B,))
    assert [entry.token_id for entry in told.verdict.logprobs] == [B]
    assert not pair.target.handle(VerifyRound("s", 1, 2, N + 1, (), Proposal()), 0.0)
    (failed,) = pair.target.step()
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == "structured_outputs.regex"
