"""The compiled judges with the arguments of the tensor ones, so that one test serves both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.decoding import sparse_acceptance
from paceline.decoding.acceptance import Decision, _decision
from paceline.decoding.sparse_acceptance import SparseChains


def _dense(name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Decision]:
    def accept(
        draft: Tensor, num_draft: Tensor, p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
    ) -> Decision:
        within = torch.arange(draft.shape[1]) < num_draft[:, None]
        rows = p[torch.arange(p.shape[1]) <= num_draft[:, None]]
        drawn_from = q[within].numpy()
        support = drawn_from > 0
        # In float64, where the wire has float32: enumerations are exact to less than a float32's rounding.
        values: Any = drawn_from[support]
        chains = SparseChains(
            draft=draft[within].numpy(),
            first=np.cumsum([0, *num_draft.tolist()]),
            ids=support.nonzero()[1].astype(np.uint32),
            values=values,
            ends=np.cumsum([0, *support.sum(1)]),
        )
        judge = getattr(sparse_acceptance, name)
        accepted, tokens = judge(chains, rows.double().numpy(), accept_u.numpy(), next_u.numpy())
        return _decision(draft, num_draft, torch.from_numpy(accepted), torch.from_numpy(tokens))

    return accept


sparse_rejection = _dense("accept_rejection")
sparse_block = _dense("accept_block")
