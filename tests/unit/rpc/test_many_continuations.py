"""A frame with more continuations for one sequence than a message may hold."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.core.limits import MAX_CONTINUATIONS
from paceline.core.messages import Continuations, SequenceFailed, VerifyAhead
from paceline.core.types import Proposal
from paceline.rpc.streams import frames

PROPOSAL = Proposal((5, 6))


@pytest.mark.parametrize(
    ("kind", "render", "parse"),
    [
        (VerifyAhead, frames.verify_request, frames.target_commands),
        (Continuations, frames.draft_response, frames.draft_events),
    ],
)
def test_too_many_continuations_fail_only_their_sequence(kind: type, render: object, parse: object) -> None:
    most = {(0, token): PROPOSAL for token in range(MAX_CONTINUATIONS)}
    many = kind("a", 1, 2, 30, {**most, (1, 0): PROPOSAL})
    neighbour = kind("b", 1, 2, 30, most)
    failed, intact = parse(render([many, neighbour]))  # type: ignore[operator]
    assert isinstance(failed, SequenceFailed)
    assert (failed.sequence_id, failed.epoch, failed.round) == ("a", 1, 2)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == "continuations"
    assert intact == neighbour
