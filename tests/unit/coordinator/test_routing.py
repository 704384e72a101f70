"""Targets by cached prefix, within a bound of load."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from coordinator.scheduling import routing
from coordinator.scheduling.routing import LOAD_BOUND, PrefixRouter, block_hashes
from tests.unit.coordinator.service import FakeLink, Service

SIZE = routing.ROUTING_BLOCK
PROMPT = list(range(100, 100 + 3 * SIZE))


@dataclass(eq=False)
class Target:
    load: int = 0
    ready: bool = True


def test_hashes_name_the_whole_prefix() -> None:
    whole = block_hashes(PROMPT, "")
    assert len(whole) == 3
    assert block_hashes([*PROMPT, 1, 2], "") == whole
    assert block_hashes(PROMPT[:SIZE], "") == whole[:1]
    other = block_hashes([0, *PROMPT[1:]], "")
    assert not set(other) & set(whole), "a later block depends on every earlier token"
    assert not set(block_hashes(PROMPT, "tenant")) & set(whole)


def test_the_longest_prefix_wins() -> None:
    router, some, more = PrefixRouter(), Target(), Target(load=2)
    router.sent(some, PROMPT[:SIZE], "")
    router.sent(more, PROMPT[: 2 * SIZE], "")
    assert router.choose([some, more], PROMPT, "") is more
    assert router.choose([some, more], [7] * 40, "") is some
    assert router.choose([some, more], PROMPT, "another tenant") is some


@pytest.mark.parametrize(("load", "follows"), [(LOAD_BOUND, True), (LOAD_BOUND + 1, False)])
def test_no_prefix_outweighs_the_bound_of_load(load: int, follows: bool) -> None:
    router, idle, busy = PrefixRouter(), Target(), Target(load=load)
    router.sent(busy, PROMPT, "")
    assert router.choose([idle, busy], PROMPT, "") is (busy if follows else idle)


def test_a_target_that_is_away_is_not_chosen() -> None:
    router, here, away = PrefixRouter(), Target(load=3), Target(ready=False)
    router.sent(away, PROMPT, "")
    assert router.choose([here, away], PROMPT, "") is here
    assert router.choose([away], PROMPT, "") is None


def test_a_lost_cache_is_forgotten() -> None:
    router, one, two = PrefixRouter(), Target(load=1), Target()
    router.sent(one, PROMPT, "")
    router.forget(one)
    assert router.choose([one, two], PROMPT, "") is two


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest blocks go first."""
    monkeypatch.setattr(routing, "MAX_REMEMBERED", 4)
    router, target, other = PrefixRouter(), Target(load=1), Target()
    for prompt in (PROMPT, [1] * 2 * SIZE, [2] * 2 * SIZE):
        router.sent(target, prompt, "")
    (known,) = router._sent.values()
    assert len(known) == 4
    assert router.choose([target, other], PROMPT, "") is other
    assert router.choose([target, other], [1] * SIZE, "") is target


def test_a_conversation_goes_on_where_it_began() -> None:
    """What a target has generated is cached there too."""
    service = Service(targets=2)
    first = service.submit(k=0, max_tokens=2 * SIZE)
    begun_at: FakeLink = first.target
    while not first.ended:
        service.answer(first, 7)
    other: FakeLink = next(target for target in service.targets if target is not begun_at)
    other.load, begun_at.load = 0, 1
    tokens = first.state.ledger.token_ids
    assert service.it.workers.router.choose(service.targets, tokens, "") is begun_at
    service.it.link_lost(begun_at)
    assert service.it.workers.router.choose(service.targets, tokens, "") is other
