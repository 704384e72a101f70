"""Drawing tokens, and the wire form of a draft's distribution.

For a ratio test, the draft sends the support it drew from. Both sides use the same float32 values: the draft
draws in proportion to them (`draw` accepts unnormalised input), and the target divides them by their float64
sum. So q is exactly the distribution behind the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SparseDistribution
from paceline.decoding.cpu.distributions import fault_of
from paceline.decoding.transfer import to_device

_FIELD = "proposal.distributions"
_FAULTS = (
    "",
    "must have ids below the vocabulary size",
    "must have non-negative probabilities",
    "must have finite probabilities",
    "must have distinct ids",
    "must have a positive sum",
    "must contain the token drawn from it",
)
"""Indexed by the result of `fault_of`."""


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution in float64.

    Never returns a token of probability 0 while a row has a positive one. Rows need not sum to 1.

    Args:
        probabilities: float [R, V], non-negative.
        u: float64 [R], uniform in [0, 1).

    Returns:
        int64 [R].
    """
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may raise u * total to the total itself, which no entry exceeds.
    point = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, point, right=True).clamp_(max=probabilities.shape[1] - 1)
    # A parallel scan may round a flat stretch unevenly, so the search may stop at a token of probability 0.
    positive = probabilities.gather(1, index) > 0
    return torch.where(positive, index, probabilities.argmax(-1, keepdim=True))[:, 0]


def point_mass(token_ids: Tensor, vocab_size: int) -> Tensor:
    """The distribution of a deterministic drafter: int64 [...] -> float64 [..., V], one-hot.

    Negative ids (padding) count as token 0.
    """
    shape = (*token_ids.shape, vocab_size)
    masses = torch.zeros(shape, dtype=torch.float64, device=token_ids.device)
    return masses.scatter_(-1, token_ids.clamp(min=0)[..., None], 1.0)


def truncate_support(
    probabilities: Tensor, mass: float = 0.995, bound: int = limits.MAX_SUPPORT
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep the fewest tokens that reach `mass` in each row, at most `bound`, and renormalise them.

    Args:
        probabilities: float [R, V], rows sum to 1.
        mass: probability mass to keep, in (0, 1].
        bound: most tokens per row.

    Returns:
        ids int64 [R, min(bound, V)] and probabilities float32 of the same shape in descending order, 0 beyond
        a row's length; lengths int64 [R], at least 1; and the mass kept before renormalising, float64 [R].
    """
    top, ids = probabilities.topk(min(bound, probabilities.shape[1]), dim=-1)
    top = top.double()
    cumulative = top.cumsum(-1)
    kept = (cumulative - top < mass) & (top > 0)
    kept[:, 0] = True
    top = top * kept
    total = top.sum(-1)
    return ids * kept, (top / total[:, None]).float(), kept.sum(-1), total


def to_sparse(ids: Tensor, probabilities: Tensor, lengths: Tensor) -> list[SparseDistribution]:
    """The padded result of `truncate_support` as wire values, one per row."""
    return wire_form(ids.cpu().numpy(), probabilities.cpu().numpy(), lengths.tolist())


def wire_form(
    ids: npt.NDArray[np.integer[Any]], probabilities: npt.NDArray[np.floating[Any]], lengths: Sequence[int]
) -> list[SparseDistribution]:
    """Wire values of rows of ids and probabilities [R, M]; row r has `lengths[r]` valid entries."""
    return [
        SparseDistribution(i[:n].tobytes(), p[:n].tobytes())
        for i, p, n in zip(
            ids.astype("<u4", copy=False), probabilities.astype("<f4", copy=False), lengths, strict=True
        )
    ]


def check_sparse(
    distributions: Sequence[SparseDistribution], vocab_size: int, token_ids: Sequence[int] | None = None
) -> None:
    """Refuse distributions that `dense_from_sparse` cannot rebuild.

    Args:
        distributions: one per draft token.
        vocab_size: V.
        token_ids: the draft tokens; if given, each must have a positive probability in its distribution.

    Raises:
        InvalidArgumentError: `proposal.distributions`; a length, an id, a probability or a sum is invalid,
            an id is repeated, or a token cannot have been drawn.
    """
    sparse_arrays(distributions, vocab_size, token_ids)


def dense_from_sparse(
    distributions: Sequence[SparseDistribution], vocab_size: int, device: torch.device | None = None
) -> Tensor:
    """Rebuild q from wire values.

    Args:
        distributions: R distributions.
        vocab_size: V.
        device: device of the result; None is the CPU.

    Returns:
        float64 [R, V], rows sum to 1.

    Raises:
        InvalidArgumentError: `proposal.distributions`, as `check_sparse`.
    """
    ids, values, ends = sparse_arrays(distributions, vocab_size)
    rows = np.repeat(np.arange(len(distributions)), np.diff(ends))
    keys, probabilities = rows * vocab_size + ids, values.astype(np.float64)
    totals = np.bincount(rows, weights=probabilities, minlength=len(distributions))
    dense = torch.zeros(len(distributions) * vocab_size, dtype=torch.float64, device=device)
    where = to_device(torch.from_numpy(keys), device)
    dense[where] = to_device(torch.from_numpy(probabilities / totals[rows]), device)
    return dense.view(len(distributions), vocab_size)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(_FIELD, message)


def sparse_arrays(
    distributions: Sequence[SparseDistribution], vocab_size: int, token_ids: Sequence[int] | None = None
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Concatenated ids and probabilities of all distributions, and their offsets [R + 1].

    Arguments and errors are those of `check_sparse`.
    """
    _require(
        all(
            len(d.token_ids) == len(d.probabilities)
            and not len(d.token_ids) % 4
            and not (d.uniform_over and d.token_ids)
            for d in distributions
        ),
        "must hold as many ids as probabilities, 4 bytes each",
    )
    _require(
        all(d.uniform_over or 0 < len(d) <= limits.MAX_SUPPORT for d in distributions),
        f"must have between 1 and {limits.MAX_SUPPORT} tokens",
    )
    _require(all(d.uniform_over <= vocab_size for d in distributions), _FAULTS[1])
    distributions = [_listed(d) for d in distributions]
    lengths = [len(d.token_ids) for d in distributions]
    drawn = np.full(len(lengths), -1, dtype=np.int64)
    if token_ids is not None:
        _require(len(token_ids) == len(lengths), "must have one entry per draft token")
        drawn = np.array(token_ids, dtype=np.int64)
    # A bytearray, because bytes give read-only arrays: another type, for which numba would compile again.
    ids = np.frombuffer(bytearray().join(d.token_ids for d in distributions), dtype="<u4")
    probabilities = np.frombuffer(bytearray().join(d.probabilities for d in distributions), dtype="<f4")
    ends = np.cumsum([0, *lengths]) // 4
    fault = fault_of(ids, probabilities, ends, vocab_size, drawn)
    _require(not fault, _FAULTS[fault])
    return ids, probabilities, ends


def _listed(distribution: SparseDistribution) -> SparseDistribution:
    """A distribution with all of its tokens in lists."""
    count = distribution.uniform_over
    if not count:
        return distribution
    return SparseDistribution(np.arange(count, dtype="<u4").tobytes(), np.ones(count, dtype="<f4").tobytes())
