"""The read bandwidth that bounds a decode step."""

from __future__ import annotations

import torch

from paceline.bench.machine import read_bandwidth


def test_reading_bandwidth_restores_the_thread_count() -> None:
    before = torch.get_num_threads()
    assert read_bandwidth("cpu", 1, num_bytes=2**20) > 0
    assert torch.get_num_threads() == before
