"""Which draft workers a sequence gets that takes several, and what becomes of its places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.sequence.messages import Phase
from paceline.core.messages import CloseSequence, DraftRound, OpenSequence
from paceline.core.types import AcceptanceMode, Proposal
from tests.unit.coordinator.service import FakeLink, Service


def service_of(*models: str) -> Service:
    """One draft for each model; targets take trees."""
    service = Service(drafts=len(models))
    service.target.known.max_tree_nodes = 64
    for number, (link, model) in enumerate(zip(service.drafts, models, strict=True)):
        link.known.model_fingerprint, link.address = model, f"fake:{number}"
    return service


def in_rejection_mode(service: Service, drafts: int) -> Any:
    """A sequence whose drafts draw."""
    links = [*service.drafts, service.target]
    for link in links:
        link.ready = False
    running = service.submit(drafts=drafts)
    running.state.params = replace(running.state.params, mode=AcceptanceMode.REJECTION)
    for link in links:
        link.ready = True
    service.it.link_ready(service.target)
    return running


def places(running: Any, links: Sequence[FakeLink]) -> list[int | None]:
    return [None if link is None else links.index(link) for link in running.drafts]


def test_a_sequence_gets_drafts_of_different_models() -> None:
    service = service_of("a", "a", "b")
    running = service.submit(drafts=2)
    assert places(running, service.drafts) == [0, 2]
    assert [link.load for link in service.drafts] == [1, 0, 1]


def test_where_the_target_decides_one_model_proposes_once() -> None:
    service = service_of("a", "a")
    assert places(service.submit(drafts=2), service.drafts) == [0, None]


def test_where_tokens_are_drawn_one_model_may_draw_twice() -> None:
    service = service_of("a", "a", "b")
    assert places(in_rejection_mode(service, 3), service.drafts) == [0, 2, 1]


def test_another_model_is_preferred_to_a_less_loaded_one() -> None:
    service = service_of("a", "a", "b")
    service.drafts[2].load = 5
    assert 2 in places(in_rejection_mode(service, 2), service.drafts)


def test_drafts_without_weights_are_told_apart_by_address() -> None:
    service = service_of("", "")
    assert places(service.submit(drafts=2), service.drafts) == [0, 1]


def test_fewer_drafts_than_wanted_are_taken() -> None:
    service = service_of("a", "b")
    running = service.submit(drafts=4)
    assert places(running, service.drafts) == [0, 1, None, None]
    service.draft_round(running)
    service.propose(running, draft=0)
    assert running.state.phase is Phase.DRAFTING
    service.propose(running, draft=1)
    assert running.state.phase is Phase.VERIFYING
    assert running.state.present.proposal == Proposal((7, 8, 9)), "equal chains are one"


def test_a_place_is_taken_by_the_next_draft_that_is_ready() -> None:
    service = service_of("a", "b", "c")
    service.drafts[2].ready = False
    running = service.submit(drafts=2)
    service.draft_round(running)
    service.lose(service.drafts[0])
    assert places(running, service.drafts) == [None, 1]
    assert running.state.phase is Phase.DRAFTING
    service.ready(service.drafts[2])
    assert places(running, service.drafts) == [2, 1]
    service.propose(running, draft=1)
    service.answer(running, 5)
    opening, asked = service.drafts[2].sent_to(running)
    assert isinstance(opening, OpenSequence)
    assert isinstance(asked, DraftRound)
    assert opening.params.draft_index == 0


def test_a_draft_may_come_back_at_another_place() -> None:
    """Its epochs go on ascending."""
    service = service_of("a", "b")
    running = service.submit(drafts=2)
    first, second = service.drafts
    service.lose(second)
    service.lose(first)
    service.ready(second)
    assert places(running, service.drafts) == [1, None]
    service.draft_round(running)
    openings = [c for c in second.sent_to(running) if isinstance(c, OpenSequence)]
    assert [c.params.draft_index for c in openings] == [1, 0]
    assert openings[0].epoch < openings[1].epoch


def test_a_stopping_draft_hands_over_to_one_of_its_model() -> None:
    service = service_of("a", "b", "a")
    running = service.submit(drafts=2)
    assert places(running, service.drafts) == [0, 1]
    leaving = service.drafts[0]
    leaving.draining = True
    service.it.link_leaving(leaving)
    assert places(running, service.drafts) == [2, 1]
    assert leaving.load == 0
    assert isinstance(leaving.sent_to(running)[-1], CloseSequence)


def test_a_stopping_draft_stays_where_no_other_can_replace_it() -> None:
    service = service_of("a", "b")
    running = service.submit(drafts=2)
    leaving = service.drafts[0]
    leaving.draining = True
    service.it.link_leaving(leaving)
    assert places(running, service.drafts) == [0, 1]


def test_only_late_drafts_count_as_silent() -> None:
    service = service_of("a", "b")
    running = service.submit(drafts=2)
    other = service.submit(drafts=1)
    service.draft_round(running, other)
    service.propose(running, draft=1)
    service.after(1.0)
    assert running.state.phase is Phase.VERIFYING
    assert [service.it.workers._silences[link].deadlines for link in service.drafts] == [1, 0]


def test_all_places_are_given_back_at_the_end() -> None:
    service = service_of("a", "b", "c")
    running = service.submit(drafts=3)
    service.it.cancel(running)
    assert [link.load for link in service.drafts] == [0, 0, 0]
    assert running.drafts == [None, None, None]
