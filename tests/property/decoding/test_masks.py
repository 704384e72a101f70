"""Masks and biases against transformers' logits processors, along chains and down trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.decoding.transforms import RowContext, RowParams, processed_logits
from paceline.rpc.codec import check_choices_remain

V = 9
EOS = 8
SETTINGS = settings(max_examples=150, deadline=None)
Words = tuple[tuple[int, ...], ...]

token = st.integers(0, V - 2)
words = st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=5, unique=True).map(tuple)
ledgers = st.lists(token, min_size=1, max_size=7)


def leaves_a_choice(request: tuple[SamplingParams, Words]) -> bool:
    """What the service takes on."""
    params, bad = request
    try:
        check_choices_remain(SequenceParams(params, AcceptanceMode.COUPLED, 1, bad), V, [EOS])
    except InvalidArgumentError:
        return False
    return True


requests = st.tuples(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        allowed_token_ids=st.none() | st.lists(st.integers(0, V - 1), min_size=1, max_size=V),
        min_tokens=st.integers(0, 6),
        logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9).filter(bool), max_size=3),
    ),
    words,
).filter(leaves_a_choice)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draft tokens and each one's parent; every second one is a chain."""
    drafts = draw(st.lists(token, max_size=6))
    if draw(st.booleans()):
        return drafts, []
    return drafts, [draw(st.integers(-1, i - 1)) for i in range(len(drafts))]


def path(drafts: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens down to a node; -1 is the root."""
    if node < 0:
        return []
    parent = parents[node] if parents else node - 1
    return [*path(drafts, parents, parent), drafts[node]]


def processors(params: SamplingParams, bad: Words, prompt_length: int) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if params.logit_bias:
        bias = [[[token_id], value] for token_id, value in params.logit_bias.items()]
        made.append(SequenceBiasLogitsProcessor(bias))
    if params.min_tokens:
        made.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, [EOS]))
    if bad:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in bad]))
    if params.allowed_token_ids is not None:
        allowed = sorted(set(params.allowed_token_ids))
        made.append(PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, num_beams=1))
    return made


@SETTINGS
@given(
    seed=st.integers(0, 2**31),
    sequences=st.lists(st.tuples(requests, ledgers, st.integers(0, 3), trees()), min_size=1, max_size=4),
)
def test_masks_equal_transformers(
    seed: int,
    sequences: list[tuple[tuple[SamplingParams, Words], list[int], int, tuple[list[int], list[int]]]],
) -> None:
    rows = [len(drafts) + 1 for *_, (drafts, _) in sequences]
    logits = torch.randn(sum(rows), V, generator=torch.Generator().manual_seed(seed)) * 4
    lengths = [max(1, len(ledger) - said) for _, ledger, said, _ in sequences]
    row_params = RowParams.build(
        [params for (params, _), *_ in sequences],
        rows,
        eos_token_ids=(EOS,),
        bad_words=[bad for (_, bad), *_ in sequences],
    )
    context = RowContext.build(
        row_params,
        [len(ledger) - n for (_, ledger, *_), n in zip(sequences, lengths, strict=True)],
        [drafts for *_, (drafts, _) in sequences],
        [None] * len(sequences),
        [parents for *_, (_, parents) in sequences],
        [ledger for _, ledger, *_ in sequences],
    )
    result = processed_logits(logits, row_params, context)
    at = 0
    for ((params, bad), ledger, _, (drafts, parents)), length in zip(sequences, lengths, strict=True):
        for node in range(-1, len(drafts)):
            seen = torch.tensor([[*ledger, *path(drafts, parents, node)]])
            expected = processors(params, bad, length)(seen, logits[at : at + 1])[0]
            assert torch.allclose(result[at], expected, atol=1e-5)
            assert bool(torch.isfinite(result[at]).any())
            at += 1


@SETTINGS
@given(bad=words, ledger=ledgers, drafts=st.lists(token, max_size=4))
def test_bad_words_need_only_the_ledgers_end(bad: Words, ledger: list[int], drafts: list[int]) -> None:
    """A worker may hand over as many tokens as the longest word has."""
    logits = torch.zeros(len(drafts) + 1, V)
    row_params = RowParams.build([SamplingParams()], [len(logits)], bad_words=[bad])
    whole, end = (
        RowContext.build(row_params, [0], [drafts], ledgers=[tokens]) for tokens in (ledger, ledger[-3:])
    )
    assert torch.equal(processed_logits(logits, row_params, whole), processed_logits(logits, row_params, end))
