"""Cached layouts of batches equal fresh ones."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch

from paceline.core.types import SamplingParams
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.rows.row_params_cache import RowParamsCache

CPU = torch.device("cpu")


def test_the_same_batch_is_laid_out_once() -> None:
    memo = RowParamsCache()
    params = [SamplingParams(temperature=0.5), SamplingParams(temperature=0)]
    first = memo.build(params, [2, 1], CPU, [3], [(), ()])
    assert memo.build(params, [2, 1], CPU, [3], [(), ()]) is first
    assert memo.build(params, [1, 2], CPU, [3], [(), ()]) is not first
    assert memo.build(params[::-1], [2, 1], CPU, [3], [(), ()]) is not first
    assert memo.build(params, [2, 1], CPU, [4], [(), ()]) is not first


def test_a_new_object_at_an_old_address_is_another_batch() -> None:
    """An id is reused once its object is freed, and the cache does not hold it."""
    memo = RowParamsCache(size=4)
    for i in range(1, 50):
        built = memo.build([SamplingParams(temperature=i / 10)], [1], CPU, (), [()])
        temperature = 1.0 if built.temperature is None else float(built.temperature)
        assert abs(temperature - i / 10) < 1e-6


def test_the_cache_is_bounded_in_bytes() -> None:
    most = 200_000
    memo = RowParamsCache(most_bytes=most)
    params = [
        *(SamplingParams(allowed_token_ids=range(i, i + 4000)) for i in range(4)),
        SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0)),
    ]
    for k in range(30):
        for mates in ([0, 1], [1, 2, 3], [2, 4], [4]):
            batch = [params[i] for i in mates]
            arguments = batch, [1 + k % 9] * len(batch), CPU, (), [()] * len(batch)
            built = memo.build(*arguments)
            assert 0 < memo.nbytes <= most
            assert (memo.build(*arguments) is built) is (built.nbytes <= most)
    assert memo.nbytes == sum(batch.row_params.nbytes for batch in memo._known.values())


def test_a_too_large_batch_evicts_no_other() -> None:
    memo = RowParamsCache(most_bytes=10_000)
    small, large = [SamplingParams(top_k=3)], [SamplingParams(allowed_token_ids=range(5000))]
    built = memo.build(small, [2], CPU, (), [()])
    assert memo.build(large, [2], CPU, (), [()]).nbytes > 10_000
    assert memo.build(small, [2], CPU, (), [()]) is built


def test_words_are_counted_with_their_objects() -> None:
    """Python objects of their tokens take five times the table."""
    words = tuple(tuple(range(1000 * i, 1000 * i + 100)) for i in range(8))
    taken = sys.getsizeof(words) + sum(sys.getsizeof(word) + sum(map(sys.getsizeof, word)) for word in words)
    memo = RowParamsCache()
    built = memo.build([SamplingParams()], [1], CPU, (), [words])
    assert memo.nbytes - built.nbytes == pytest.approx(taken, rel=0.05)


def test_a_list_is_laid_out_once_for_all_rows() -> None:
    params = [SamplingParams(allowed_token_ids=range(1000))]
    few, many = (RowParams.build(params, [rows]).nbytes for rows in (1, 33))
    assert few == many < 5000


def test_ended_requests_are_not_kept_alive() -> None:
    memo, params = RowParamsCache(), SamplingParams(allowed_token_ids=range(1000))
    memo.build([params], [1], CPU, (), [()])
    ended = weakref.ref(params)
    del params
    assert ended() is None
