"""The transforms against transformers' logits processors, and against slow obvious loops."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.core.types import SamplingParams
from paceline.decoding.transforms import RowContext, RowParams, ledger_counts, processed_logits, scores_of

V = 23
SETTINGS = settings(max_examples=60, deadline=None)

tokens = st.lists(st.integers(0, V - 1), max_size=12)
seeds = st.integers(0, 2**31)
warped = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, V + 3),
    top_p=st.floats(0.05, 1),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
    repetition_penalty=st.floats(0.5, 2),
)
penalised = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-20, 20), max_size=3),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=2),
    min_tokens=st.integers(0, 8),
    max_tokens=st.none(),
)


def random_logits(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 4


def processors(params: SamplingParams) -> LogitsProcessorList:
    made: list[LogitsProcessor] = [
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        TemperatureLogitsWarper(params.temperature),
    ]
    if params.min_p > 0:
        made.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        made.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        made.append(TopPLogitsWarper(params.top_p))
    return LogitsProcessorList(made)


@SETTINGS
@given(
    seed=seeds, params=warped, prompt=tokens.filter(bool), drafts=st.lists(st.integers(0, V - 1), max_size=4)
)
def test_distributions_equal_transformers(
    seed: int, params: SamplingParams, prompt: list[int], drafts: list[int]
) -> None:
    logits = random_logits(seed, len(drafts) + 1)
    row_params = RowParams.build([params], [len(logits)])
    context = RowContext.build(row_params, [0], [drafts], [ledger_counts(prompt, len(prompt), V)])
    result = scores_of(logits, row_params, context).softmax(-1)
    for i in range(len(logits)):
        seen = torch.tensor([prompt + drafts[:i]])
        expected = processors(params)(seen, logits[i : i + 1]).softmax(-1)[0]
        assert torch.allclose(result[i], expected, atol=2e-6)


def slow(
    row: list[float], params: SamplingParams, prompt: list[int], generated: list[int], eos: int
) -> list[float]:
    """Penalties, bias and mask of one row, token by token, as the words say."""
    out = []
    for token, logit in enumerate(row):
        value = logit
        if token in prompt or token in generated:
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        value -= params.frequency_penalty * generated.count(token)
        value -= params.presence_penalty if token in generated else 0.0
        value += params.logit_bias.get(token, 0.0)
        if len(generated) < params.min_tokens and (token == eos or token in params.stop_token_ids):
            value = -math.inf
        out.append(value)
    return out


@SETTINGS
@given(
    seed=seeds,
    sequences=st.lists(
        st.tuples(penalised, tokens, tokens, st.lists(st.integers(0, V - 1), max_size=5)),
        min_size=1,
        max_size=4,
    ),
)
def test_penalties_bias_and_mask_follow_the_proposal(
    seed: int, sequences: list[tuple[SamplingParams, list[int], list[int], list[int]]]
) -> None:
    eos = 3
    drafts = [draft for _, _, _, draft in sequences]
    rows = [len(draft) + 1 for draft in drafts]
    logits = random_logits(seed, sum(rows))
    row_params = RowParams.build([params for params, *_ in sequences], rows, eos_token_ids=(eos,))
    counts = [ledger_counts([*prompt, *said], len(prompt), V) for _, prompt, said, _ in sequences]
    context = RowContext.build(row_params, [len(said) for _, _, said, _ in sequences], drafts, counts)
    result = processed_logits(logits, row_params, context)
    at = 0
    for params, prompt, said, draft in sequences:
        for i in range(len(draft) + 1):
            expected = slow(logits[at].tolist(), params, prompt, said + draft[:i], eos)
            assert torch.allclose(result[at], torch.tensor(expected), atol=1e-4)
            at += 1


@SETTINGS
@given(ledger=tokens, more=tokens, data=st.data())
def test_token_counts_can_be_kept_and_extended(
    ledger: list[int], more: list[int], data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(0, len(ledger)))
    kept = ledger_counts(ledger, prompt, V)
    for token in more:
        kept[:, token] += 1
    assert torch.equal(kept, ledger_counts([*ledger, *more], prompt, V))
