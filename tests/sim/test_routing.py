"""Prefix routing over three targets beside routing by load alone, in one run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from coordinator.scheduling import routing
from coordinator.scheduling.routing import LOAD_BOUND, PrefixRouter
from paceline.core.types import SamplingParams
from tests.sim.scenarios import DRAFT, EOS, MAX_MODEL_LEN, TARGET, check_equal
from tests.sim.world import Request, World

TOYS_BLOCK = 4
"""Tokens in a block of the toy workers' caches."""
GROUPS, EACH = 9, 8


def shared_prefixes(seed: int) -> World:
    """Requests of nine groups; those of a group begin with the same 28 tokens."""
    world = World(
        seed,
        target=TARGET,
        draft=DRAFT,
        num_targets=3,
        target_blocks=64,
        eos=EOS,
        max_model_len=MAX_MODEL_LEN,
    )
    rng = random.Random(seed)
    prefixes = [tuple(rng.choices(range(5), k=28)) for _ in range(GROUPS)]
    order = [group for group in range(GROUPS) for _ in range(EACH)]
    rng.shuffle(order)
    for i, group in enumerate(order):
        prompt = (*prefixes[group], *rng.choices(range(5), k=3))
        sampling = SamplingParams(seed=i, max_tokens=6, ignore_eos=True)
        world.submit(Request(f"s{i}", prompt, sampling, arrives=0.012 * i))
    return world


def hit_rate(world: World) -> float:
    """Tokens from the targets' prefix caches over tokens looked up there."""
    indexes = [link.worker.core.sequences.prefix_index for link in world.targets]
    return sum(index.hits for index in indexes) / sum(index.queries for index in indexes)


class ByLoad(PrefixRouter):
    """Knows nothing of prefixes."""

    def sent(self, *_: Any) -> None:
        pass


def test_prefix_routing_hits_more_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "ROUTING_BLOCK", TOYS_BLOCK)
    uneven = 0
    choose = PrefixRouter.choose

    def watched(self: PrefixRouter, targets: Any, *args: Any) -> Any:
        nonlocal uneven
        chosen = choose(self, targets, *args)
        if chosen is not None:
            uneven = max(uneven, chosen.load - min(target.load for target in targets if target.ready))
        return chosen

    monkeypatch.setattr(PrefixRouter, "choose", watched)
    rates: dict[type[PrefixRouter], float] = {}
    for router in (PrefixRouter, ByLoad):
        world = shared_prefixes(1)
        world.dispatcher.workers.router = router()
        world.run()
        for client in world.clients:
            check_equal(client)
        rates[router] = hit_rate(world)
    assert 0 < uneven <= LOAD_BOUND
    # Of 8 requests of a group, 7 can find its prefix at one target, 5 at three.
    assert rates[PrefixRouter] > 1.1 * rates[ByLoad]
