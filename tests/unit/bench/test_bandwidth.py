"""The floor under a decode step."""

from __future__ import annotations

import torch

from paceline.bench.machine import read_bandwidth


def test_bandwidth_is_measured_with_the_model_s_threads_and_leaves_ours() -> None:
    before = torch.get_num_threads()
    assert read_bandwidth("cpu", 1, num_bytes=2**20) > 0
    assert torch.get_num_threads() == before
