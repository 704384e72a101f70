"""Log-probabilities that are reported, against a sort of each row."""

from __future__ import annotations

import pytest
import torch

from paceline.decoding.logprobs import reported_logprobs

V = 11
LOGITS = torch.randn(6, V, generator=torch.Generator().manual_seed(3)) * 5


def test_each_row_reports_its_requested_count() -> None:
    tokens, counts = [0, 3, 10, 5, 5, 1], [0, 1, 2, 20, 5, 0]
    entries = reported_logprobs(LOGITS, tokens, counts)
    for row, token, count, entry in zip(LOGITS, tokens, counts, entries, strict=True):
        values = row.double().log_softmax(-1)
        order = values.argsort(descending=True).tolist()
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(values[token]), abs=1e-6)
        assert entry.rank == order.index(token) + 1
        assert entry.top_token_ids == tuple(order[:count])
        assert entry.top_logprobs == pytest.approx([float(values[t]) for t in order[:count]], abs=1e-6)


def test_reported_values_are_exact_float32() -> None:
    (entry,) = reported_logprobs(LOGITS[:1], [4], [3])
    values = LOGITS[:1].log_softmax(-1)[0]
    assert entry.logprob == float(values[4])
    assert entry.top_logprobs == tuple(values.topk(3).values.tolist())


def test_half_precision_is_widened_first() -> None:
    (entry,) = reported_logprobs(LOGITS[:1].half(), [4], [0])
    assert entry.logprob == float(LOGITS[:1].half().float().log_softmax(-1)[0, 4])


def test_ties_share_a_rank_and_impossible_tokens_come_last() -> None:
    logits = torch.tensor([[1.0, 1.0, -torch.inf, 0.0]])
    ranks = [reported_logprobs(logits, [token], [4])[0].rank for token in range(4)]
    assert ranks == [1, 1, 4, 3]
    (entry,) = reported_logprobs(logits, [2], [4])
    assert entry.logprob == entry.top_logprobs[-1] == -torch.inf


def test_no_rows_give_no_reports() -> None:
    assert reported_logprobs(LOGITS[:0], [], []) == []
