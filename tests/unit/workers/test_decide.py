"""Both ways to judge by a ratio, by sparse numbers on a CPU and in tensors, say the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.decoding.support import draw_sparse
from target_worker.decide import Case, _densely, _sparsely

VOCAB = 50


def case(rng: np.random.Generator, k: int, mode: AcceptanceMode, points: bool) -> Case:
    params = SequenceParams(SamplingParams(seed=1), mode, 1)
    scores = torch.from_numpy(rng.standard_normal((k, VOCAB)).astype(np.float32))
    tokens, sent = draw_sparse(scores, torch.from_numpy(rng.random(k)), 0.95, 20)
    return Case(params, [0], Proposal(tuple(tokens), distributions=() if points else tuple(sent)))


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
@pytest.mark.parametrize("seed", range(20))
def test_sparse_numbers_and_tensors_decide_alike(mode: AcceptanceMode, seed: int) -> None:
    """Chains of all lengths, none included, some of them without distributions."""
    rng = np.random.default_rng(seed)
    group = [case(rng, k, mode, points=rng.random() < 0.2) for k in rng.integers(0, 6, 1 + seed)]
    rows = sum(c.rows for c in group)
    p = torch.from_numpy(rng.standard_normal((rows, VOCAB)) * 1.5).softmax(-1)
    longest = max(1, *(c.num_draft for c in group), 0)
    noise = (
        torch.from_numpy(rng.random((len(group), longest))),
        torch.from_numpy(rng.random(len(group))),
    )
    assert _sparsely(group, mode, p, *noise) == _densely(group, mode, p, *noise)
