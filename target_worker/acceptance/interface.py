"""What an acceptance rule is: from scores to the accepted draft tokens and the next token of each round.

A rule knows nothing of the other rules, of grammars or of the pass. It is given the rounds of its mode only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from target_worker.acceptance.items import VerifyItem
from target_worker.acceptance.noise import RoundNoise


class RuleOutcome(NamedTuple):
    """What a rule decides on one round."""

    num_accepted: int
    next_token: int | None
    """The correction or the bonus; None where every token that the request permits is impossible."""
    last_node: int | None = None
    """The last accepted node of a tree; None for a chain, or where nothing is accepted."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Decisions that are still on the device.

    The numbers of all rules that judge rounds of a pass come to the host in one copy.
    """

    numbers: Tensor
    """int64 [N], on the device of the scores."""
    read: Callable[[Sequence[int]], list[RuleOutcome]]
    """The outcome of each item, in order, from these numbers on the host."""


Judge = Callable[[Sequence[VerifyItem], Tensor, RoundNoise], Pending]
"""(items, scores, noise) -> decisions. It must not wait for the device.

items: S rounds, with trees only where the mode's facts say that it takes them.
scores: float32 [sum of the items' rows, V], each item's rows in order. The target's distribution is the
    softmax of a row; at temperature 0 it is the row's argmax. -inf for a token that the request forbids.
noise: the rounds' random numbers.
"""
JudgeFew = Callable[[Sequence[VerifyItem], Tensor], list[RuleOutcome | None]]
"""The same in one call, for a few rows on a CPU whose requests ask for a temperature at most.

The logits, float32 [sum of the items' rows, V], are the model's own. None for an item with a row that is not
a distribution: NaN, infinity, or -inf throughout.
"""


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """How one acceptance mode decides."""

    judge: Judge
    judge_few: JudgeFew | None = None
    """A shortcut; None: there is none."""


def outcomes_of(decided: Iterable[tuple[int, int]]) -> list[RuleOutcome]:
    """Outcomes from numbers of a device: (accepted, next token), where -1 stands for no token."""
    return [RuleOutcome(accepted, token if token >= 0 else None) for accepted, token in decided]


def on_host(tensor: Tensor) -> bool:
    """True where reading a tensor does not wait for a device."""
    return tensor.device.type == "cpu"
