"""Asking again without a draft: what came under load must be what the target alone says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.types import SpeculationParams
from paceline.loadtest.outcomes import RequestOutcome


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that was another one when it was asked for again."""

    number: int
    """Of the request."""
    index: int
    """The first token that differs; where one answer is the beginning of the other, the first behind it."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What asking again found."""

    compared: int
    differences: tuple[Difference, ...]
    failures: tuple[str, ...]
    """Of requests that could not be asked for again: why."""
    unasked: int
    """Answers that were to be asked for again when the test was stopped."""

    @property
    def sound(self) -> bool:
        """True if all that were to be compared are equal."""
        return not (self.differences or self.failures or self.unasked)


def chosen(outcomes: Sequence[RequestOutcome], most: int) -> list[RequestOutcome]:
    """At most so many of those that finished, evenly from the whole test: its ends are its quietest parts."""
    finished = sorted((o for o in outcomes if o.answer), key=lambda outcome: outcome.number)
    most = min(most, len(finished))
    return [finished[(2 * i + 1) * len(finished) // (2 * most)] for i in range(most)]


def without_draft(speculation: SpeculationParams) -> SpeculationParams:
    """The same request, decoded plainly."""
    return replace(speculation, num_speculative_tokens=0, prompt_lookup=False)


def compared(first: Sequence[RequestOutcome], again: Sequence[RequestOutcome]) -> VerifyReport:
    """Answers of a load with those to the same requests, which `again` has in the same order.

    It is shorter where the test was stopped meanwhile.
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
