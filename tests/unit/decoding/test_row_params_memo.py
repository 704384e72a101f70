"""Laying a batch out again gives what it gave before, and never another batch's layout."""

from __future__ import annotations

import torch

from paceline.core.types import SamplingParams
from paceline.decoding.row_params import RowParamsMemo

CPU = torch.device("cpu")


def test_the_same_batch_is_laid_out_once() -> None:
    memo = RowParamsMemo()
    params = [SamplingParams(temperature=0.5), SamplingParams(temperature=0)]
    first = memo.build(params, [2, 1], CPU, [3], [(), ()])
    assert memo.build(params, [2, 1], CPU, [3], [(), ()]) is first
    assert memo.build(params, [1, 2], CPU, [3], [(), ()]) is not first
    assert memo.build(params[::-1], [2, 1], CPU, [3], [(), ()]) is not first
    assert memo.build(params, [2, 1], CPU, [4], [(), ()]) is not first


def test_a_new_object_in_an_old_one_s_place_is_another_batch() -> None:
    """An identity is free for others only once nobody holds the object: the memo does."""
    memo = RowParamsMemo(size=4)
    for i in range(1, 50):
        built = memo.build([SamplingParams(temperature=i / 10)], [1], CPU, (), [()])
        temperature = 1.0 if built.temperature is None else float(built.temperature)
        assert abs(temperature - i / 10) < 1e-6
