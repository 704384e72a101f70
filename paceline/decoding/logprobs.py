"""Reported log-probabilities of chosen tokens and of the most likely tokens.

They belong to the model's own distribution, before penalties, bias, masks, temperature and filters (vLLM's
`raw_logprobs`), so a token's log-probability does not depend on the sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.types import TokenLogprobs
from paceline.decoding.transfer import to_device


def reported_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The report of one position per row, with one copy from the device.

    Args:
        logits: float [R, V], untransformed.
        token_ids: the R tokens at these positions.
        counts: number of most likely tokens to report at each position, capped at V.

    Returns:
        One entry per row.
    """
    values = logits.float().log_softmax(-1)
    tokens = to_device(torch.tensor(token_ids, dtype=torch.int64), values.device)[:, None]
    chosen = values.gather(1, tokens)
    ranks = (values > chosen).sum(-1, keepdim=True) + 1
    top = values.topk(min(max(counts, default=0), values.shape[1]), dim=-1)
    # float64 represents float32 values and ids without rounding.
    table = torch.cat([part.double() for part in (chosen, ranks, top.values, top.indices)], dim=1).tolist()
    width = top.values.shape[1]
    return [
        TokenLogprobs(
            token_id,
            row[0],
            int(row[1]),
            tuple(int(token) for token in row[2 + width : 2 + width + count]),
            tuple(row[2 : 2 + min(count, width)]),
        )
        for token_id, count, row in zip(token_ids, counts, table, strict=True)
    ]
