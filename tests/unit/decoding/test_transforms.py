"""Batches, contexts and corners of the transforms; the mathematics is in the property tests."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams
from paceline.decoding.transforms import RowContext, RowParams, ledger_counts, processed_logits, scores_of

V = 12


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def test_plain_rows_are_the_logits_and_stay_unchanged() -> None:
    x = logits(3)
    plain = RowParams.build([SamplingParams()], [3])
    assert processed_logits(x, plain) is x
    assert not plain.needs_context
    assert scores_of(x, plain) is x
    before = x.clone()
    busy = RowParams.build([SamplingParams(logit_bias={1: 5.0}, top_k=3, min_p=0.1, top_p=0.5)], [3])
    scores_of(x, busy)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_becomes_float32(dtype: torch.dtype) -> None:
    row_params = RowParams.build([SamplingParams(temperature=0.5)], [2])
    assert scores_of(logits(2).to(dtype), row_params).dtype == torch.float32


def test_temperature_only_rows_do_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise AssertionError("sorted")

    monkeypatch.setattr("paceline.decoding.transforms._filter_top", fail)
    row_params = RowParams.build(
        [SamplingParams(temperature=0.7), SamplingParams(temperature=0, top_k=5)], [2, 2]
    )
    scores_of(logits(4), row_params)


def test_filters_do_not_change_a_greedy_choice() -> None:
    x = logits(4)
    x[2, [3, 7]] = 50.0
    params = [SamplingParams(), SamplingParams(temperature=0, top_p=0.3, min_p=0.5, top_k=2)]
    result = scores_of(x, RowParams.build(params, [2, 2]))
    assert torch.equal(result, x)


def test_a_mixed_batch_equals_single_sequences() -> None:
    params = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=4, repetition_penalty=1.3, min_tokens=9),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.6, logit_bias={2: -4.0, 0: 1.0}),
        SamplingParams(
            min_p=0.2, presence_penalty=0.5, frequency_penalty=-0.3, stop_token_ids=(5,), min_tokens=3
        ),
    ]
    ledgers = [[1, 2], [3, 3, 4], [5], [6, 7], [8, 8, 9, 9, 8]]
    prompts = [1, 2, 1, 1, 3]
    drafts = [[1, 1], [3], [], [2, 4, 4], [8, 1]]
    rows = [len(d) + 1 for d in drafts]
    generated = [len(x) - n for x, n in zip(ledgers, prompts, strict=True)]
    counts = [ledger_counts(x, n, V) for x, n in zip(ledgers, prompts, strict=True)]
    x = logits(sum(rows))
    batch = RowParams.build(params, rows, eos_token_ids=(0,))
    assert batch.needs_counts == (1, 4)
    needed = [c if i in batch.needs_counts else None for i, c in enumerate(counts)]
    result = scores_of(x, batch, RowContext.build(batch, generated, drafts, needed))
    start = 0
    for i, n in enumerate(rows):
        alone = RowParams.build(params[i : i + 1], [n], eos_token_ids=(0,))
        context = RowContext.build(alone, generated[i : i + 1], drafts[i : i + 1], counts[i : i + 1])
        assert torch.equal(result[start : start + n], scores_of(x[start : start + n], alone, context))
        start += n


def test_min_tokens_masks_eos_and_stop_ids_until_reached() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(5, 0), max_tokens=9)
    row_params = RowParams.build([params], [4], eos_token_ids=(0, 1))
    context = RowContext.build(row_params, [1], [[7, 7, 7]])
    assert context.num_generated.tolist() == [1, 2, 3, 4]
    masked = scores_of(logits(4), row_params, context) == -torch.inf
    assert masked.nonzero().tolist() == [[r, t] for r in (0, 1) for t in (0, 1, 5)]


def test_a_trees_rows_see_the_path_to_their_node() -> None:
    params = SamplingParams(frequency_penalty=0.5, min_tokens=2, stop_token_ids=(4,))
    row_params = RowParams.build([params, params], [5, 2])
    counts = ledger_counts([1, 1, 2], 2, V)
    context = RowContext.build(
        row_params, [1, 1], [[6, 7, 7, 8], [9]], [counts, counts], parents=[(-1, 0, 1, -1), ()]
    )
    assert context.num_generated.tolist() == [1, 2, 3, 4, 2, 1, 2]
    assert context.counts is not None
    paths = [[], [6], [6, 7], [6, 7, 7], [8], [], [9]]
    expected = [ledger_counts([1, 1, 2, *path], 2, V) for path in paths]
    assert torch.equal(context.counts, torch.stack(expected))


def test_host_counts_are_moved_to_the_rows_device() -> None:
    """On a device whose tensors hold nothing: to mix devices fails, and so does to look at a number."""
    meta = torch.device("meta")
    masked = SamplingParams(
        repetition_penalty=1.2, min_tokens=3, stop_token_ids=(5,), allowed_token_ids=(1, 5, 7)
    )
    params = [masked, SamplingParams()]
    row_params = RowParams.build([*params, params[0]], [3, 1, 2], meta)
    counts = ledger_counts([1, 1, 2], 2, V)
    context = RowContext.build(row_params, [1, 0, 1], [[6, 7], [], [8]], [counts, None, counts])
    assert context.counts is not None
    assert (context.counts.device, context.counts.shape) == (meta, (5, 2, V))
    assert scores_of(logits(6).to(meta), row_params, context).shape == (6, V)


def test_contexts_of_the_wrong_size_are_refused() -> None:
    row_params = RowParams.build([SamplingParams(presence_penalty=1.0)], [3])
    with pytest.raises(ValueError, match="one more row"):
        RowContext.build(row_params, [0], [[1]], [ledger_counts([], 0, V)])
    with pytest.raises(ValueError, match="ledger counts"):
        RowContext.build(row_params, [0], [[1, 2]], [None])
    with pytest.raises(ValueError, match="context"):
        scores_of(logits(3), row_params)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={V: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(V,), min_tokens=1), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=(V, 0)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(2**32 + 1,)), "allowed_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams, field: str) -> None:
    row_params = RowParams.build([params], [1])
    context = RowContext.build(row_params, [0], [[]])
    with pytest.raises(InvalidArgumentError) as error:
        processed_logits(logits(1), row_params, context)
    assert error.value.field == field


def test_a_row_of_nan_does_not_affect_others() -> None:
    x = logits(3)
    params = [SamplingParams(top_k=4, top_p=0.8, min_p=0.05, temperature=0.6)]
    row_params = RowParams.build(params, [3])
    expected = scores_of(x, row_params)
    x[1] = torch.nan
    result = scores_of(x, row_params)
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    x = torch.zeros(1, V)
    kept = scores_of(x, RowParams.build([SamplingParams(top_p=0.3)], [1])) > -torch.inf
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 2, 3]


def test_top_p_of_one_in_a_filtered_batch_drops_nothing() -> None:
    x = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)) * 10
    params = [SamplingParams(top_k=4999), SamplingParams(top_p=0.9)]
    assert int((scores_of(x, RowParams.build(params, [1, 1]))[0] > -torch.inf).sum()) == 4999
