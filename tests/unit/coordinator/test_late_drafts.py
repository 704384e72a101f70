"""A late proposal whose time depends on its tokens: waited for where the target judges it by q."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.sequence.messages import Phase
from paceline.core.errors import InternalError, NotFoundError
from paceline.core.messages import DraftRound, OpenSequence
from paceline.core.types import AcceptanceMode
from tests.unit.coordinator.service import Service, failure_of

RATIO_MODES = [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK]


def drafting(
    mode: AcceptanceMode, *, sub_drafter: str = "ngram", drafts: int = 1, temperature: float = 1.0
) -> tuple[Service, Any]:
    """A sequence that waits for its draft, at 0 seconds; its deadlines are a second."""
    service = Service(drafts=drafts)
    for link in service.drafts:
        link.known.sub_drafter = sub_drafter
    running = service.submit(max_tokens=40)
    params = running.state.params
    sampling = replace(params.sampling, temperature=temperature)
    running.state.params = replace(params, mode=mode, sampling=sampling)
    service.draft_round(running)
    return service, running


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_a_late_hierarchical_draft_is_waited_for(mode: AcceptanceMode) -> None:
    """As long as its worker answers anything."""
    service, running = drafting(mode)
    other = service.submit(max_tokens=40)
    asked = running.drafts[0].sent_to(running)[-1]
    assert isinstance(asked, DraftRound)
    for _ in range(5):
        service.draft_round(other)
        service.after(0.5)
        service.propose(other)
        service.after(0.5)
        assert running.state.phase is Phase.DRAFTING
        assert running.drafts[0].sent_to(running)[-1] == replace(asked, committed_tail=())
    assert running.drafts[0].hung_up == 0
    service.propose(running)
    assert running.state.phase is Phase.VERIFYING
    assert running.state.present.proposal.token_ids == (7, 8, 9)
    assert running.state.drafts[0].failures == 0


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_a_silent_worker_ends_the_wait(mode: AcceptanceMode) -> None:
    service, running = drafting(mode, drafts=2)
    draft = running.drafts[0]
    service.after(1.0)
    assert (draft.hung_up, running.state.phase) == (0, Phase.DRAFTING)
    service.after(1.0)
    assert draft.hung_up == 1
    service.lose(draft)
    assert running.state.phase is Phase.VERIFYING
    assert running.state.present.proposal.num_draft_tokens == 0
    assert running.drafts[0] is not draft


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_a_worker_that_lost_the_round_is_asked_again(mode: AcceptanceMode) -> None:
    service, running = drafting(mode)
    service.after(1.0)
    lost = replace(
        failure_of(running, NotFoundError("no such sequence")), epoch=running.state.drafts[0].epoch
    )
    service.it.link_events(running.drafts[0], [lost])
    opening, asked = running.drafts[0].sent_to(running)[-2:]
    assert isinstance(opening, OpenSequence)
    assert isinstance(asked, DraftRound)
    service.propose(running)
    assert running.state.present.proposal.token_ids == (7, 8, 9)


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_a_failed_hierarchical_draft_is_left_out(mode: AcceptanceMode) -> None:
    """The worker fails only where it has drawn nothing."""
    service, running = drafting(mode)
    failed = replace(failure_of(running, InternalError("broken")), epoch=running.state.drafts[0].epoch)
    service.it.link_events(running.drafts[0], [failed])
    assert running.state.phase is Phase.VERIFYING


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        (AcceptanceMode.COUPLED, {}),
        (AcceptanceMode.BLOCK, {"sub_drafter": ""}),
        (AcceptanceMode.BLOCK, {"temperature": 0.0}),
    ],
    ids=["coupled", "no sub-drafter", "greedy"],
)
def test_other_late_drafts_are_left_out(mode: AcceptanceMode, changes: dict[str, Any]) -> None:
    """Their tokens are the target's own, or their time depends on none."""
    service, running = drafting(mode, **changes)
    service.after(1.0)
    assert running.state.phase is Phase.VERIFYING
    assert running.state.present.proposal.num_draft_tokens == 0


def test_a_draft_that_draws_nothing_is_left_out() -> None:
    """It takes its likeliest tokens: the same ones however long that takes."""
    service, running = drafting(AcceptanceMode.REJECTION)
    state = running.state
    state.draft_params = replace(state.params, sampling=replace(state.params.sampling, temperature=0.0))
    service.after(1.0)
    assert state.phase is Phase.VERIFYING


def test_each_worker_says_whether_it_has_a_sub_drafter() -> None:
    service, running = drafting(AcceptanceMode.BLOCK, drafts=2)
    first, other = running.drafts[0], next(link for link in service.drafts if link is not running.drafts[0])
    other.known.sub_drafter = ""
    service.lose(first)
    assert running.drafts[0] is other
    assert not running.state.drafts[0].sub_drafted
