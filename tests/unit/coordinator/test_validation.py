"""Origins of a verdict's tokens."""

from __future__ import annotations

import pytest

from coordinator.sequence.validation import with_origins
from paceline.core.types import Proposal, TokenOrigin, Verdict


@pytest.mark.parametrize(
    ("drafts", "accepted", "last", "origin"),
    [
        ((), 0, 5, TokenOrigin.TARGET),
        ((5, 6), 2, 5, TokenOrigin.BONUS),
        ((5, 6), 1, 7, TokenOrigin.CORRECTION),
        ((5, 6), 0, 6, TokenOrigin.CORRECTION),
        ((5, 6), 1, 6, TokenOrigin.ACCEPTED),  # a grammar gave up behind it
    ],
)
def test_the_last_token_has_its_origin(
    drafts: tuple[int, ...], accepted: int, last: int, origin: TokenOrigin
) -> None:
    verdict = Verdict(accepted, (*drafts[:accepted], last), 9)
    told = with_origins(verdict, Proposal(drafts))
    assert told == [*((token, TokenOrigin.ACCEPTED) for token in drafts[:accepted]), (last, origin)]
