"""Verification: answers under load must equal those of plain decoding by the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import SpeculationParams
from paceline.loadtest.outcomes import RequestOutcome


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that differs from plain decoding."""

    number: int
    """Number of the request."""
    index: int
    """Index of the first different token, or the length of the shorter answer if it is a prefix."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Results of the verification."""

    compared: int
    differences: tuple[Difference, ...]
    failures: tuple[str, ...]
    """Errors of failed verification requests."""
    unasked: int
    """Answers not yet verified when the test was stopped."""

    @property
    def sound(self) -> bool:
        """True if all selected answers were compared and are equal."""
        return not (self.differences or self.failures or self.unasked)


def chosen(outcomes: Sequence[RequestOutcome], most: int) -> list[RequestOutcome]:
    """Select at most `most` finished requests, evenly over the test, because its ends have the least load."""
    finished = sorted((o for o in outcomes if o.answer), key=lambda outcome: outcome.number)
    most = min(most, len(finished))
    return [finished[(2 * i + 1) * len(finished) // (2 * most)] for i in range(most)]


def without_draft(speculation: SpeculationParams) -> SpeculationParams:
    """Plain decoding in the same mode."""
    return SpeculationParams(num_speculative_tokens=0, acceptance=speculation.acceptance)


def compared(first: Sequence[RequestOutcome], again: Sequence[RequestOutcome]) -> VerifyReport:
    """Compare outcomes under load with the repeated requests `again`, in the same order.

    `again` is shorter if the test was stopped.
    """
    pairs = [
        (one.number, one.answer.token_ids, plain.answer.token_ids)
        for one, plain in zip(first, again, strict=False)
        if one.answer and plain.answer
    ]
    differences = (
        Difference(number, _first_difference(tokens, plain))
        for number, tokens, plain in pairs
        if tokens != plain
    )
    failures = (failure for plain in again if (failure := plain.failure))
    return VerifyReport(len(pairs), tuple(differences), tuple(failures), len(first) - len(again))


def _first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    shared = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), min(len(one), len(other)))
