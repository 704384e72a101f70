"""Outcomes whose figures can be computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.client.results import RoundTimings, SpeculativeDecoding
from paceline.core.types import AcceptanceMode
from paceline.loadtest.outcomes import CompleteAnswer, RequestOutcome


def answer(**changes: Any) -> CompleteAnswer:
    """Two rounds with proposals of two tokens, of which one and two were accepted, and one without."""
    values: dict[str, Any] = {
        "acceptance": AcceptanceMode.COUPLED,
        "finish_reason": "length",
        "prompt_tokens": 10,
        "speculative_decoding": SpeculativeDecoding(
            mean_acceptance_length=2.5,
            draft_acceptance_rate=0.75,
            acceptance_histogram=(0, 1, 1),
            num_spec_steps=2,
            num_draft_tokens=4,
            num_accepted_draft_tokens=3,
            acceptance_rate_per_position=(1.0, 0.5),
            num_rounds=3,
            num_lookahead_hits=1,
            num_prompt_lookups=1,
        ),
        "timings": RoundTimings(draft=0.3, target=0.6, queue=0.03, wire=0.06, coordinator=0.09, total=1.2),
        "token_ids": (1, 2, 3, 4, 5, 6),
    } | changes
    return CompleteAnswer(**values)


def outcome(number: int = 0, due: float = 0.0, **changes: Any) -> RequestOutcome:
    """Sent 0.1 s late; 1, 2 and 3 tokens 0.5, 0.7 and 1 s after it was due; ends 0.1 s later."""
    values: dict[str, Any] = {
        "number": number,
        "due": due,
        "sent": due + 0.1,
        "ended": due + 1.1,
        "times": (due + 0.5, due + 0.7, due + 1.0),
        "counts": (1, 2, 3),
        "answer": answer(),
    } | changes
    return RequestOutcome(**values)


@pytest.fixture
def make_outcome() -> Any:
    """Makes an outcome, with changes."""
    return outcome


@pytest.fixture
def make_answer() -> Any:
    """Makes an answer, with changes."""
    return answer
