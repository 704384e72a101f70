"""Too little memory for all, and common prefixes: no sequence's tokens change.

`World` looks into every cache after every step (caches.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.tiers import mostly_full

from paceline.core.errors import ResourceExhaustedError
from paceline.core.types import SamplingParams
from tests.sim.scenarios import DRAFT, EOS, MAX_MODEL_LEN, TARGET, check_equal, crowded_world
from tests.sim.world import Faults, Request, World, chosen_seeds


def counts(world: World) -> tuple[int, int, int]:
    """(preemptions by workers, those the coordinator saw, prefix hits in tokens)."""
    sequences = [link.worker.core.sequences for link in (*world.targets, *world.drafts)]
    hits = sum(one.prefix_index.hits for one in sequences)
    return sum(one.num_preemptions for one in sequences), world.dispatcher.num_preemptions, hits


@pytest.mark.parametrize("num_seeds", mostly_full([20, 60], count=1))
def test_a_crowd_with_little_memory_gets_its_tokens(num_seeds: int) -> None:
    preempted = seen = hits = 0
    for seed in chosen_seeds(num_seeds):
        world = crowded_world(seed)
        world.run()
        for client in world.clients:
            check_equal(client)
        here = counts(world)
        preempted, seen, hits = preempted + here[0], seen + here[1], hits + here[2]
    # The runs are about this, so they must have met it.
    assert preempted > 0.8 * num_seeds
    assert seen > 0.3 * num_seeds
    assert hits > 8 * num_seeds


def crowd(blocks: int, count: int, **options: object) -> World:
    world = World(
        3,
        target=TARGET,
        draft=DRAFT,
        target_blocks=blocks,
        eos=EOS,
        max_model_len=MAX_MODEL_LEN,
        **options,  # type: ignore[arg-type]
    )
    for i in range(count):
        sampling = SamplingParams(seed=i, max_tokens=20, ignore_eos=True)
        world.submit(Request(f"s{i}", (i % 5, 1, i % 3, 2), sampling, arrives=0.0001 * i))
    return world


@pytest.mark.parametrize("count", [2, 4, 12])
def test_a_pool_for_one_serves_many_oldest_first(count: int) -> None:
    world = crowd(7, count, faults=Faults())
    order: list[str] = []
    forget = world.dispatcher._forget

    def forgetting(running: object) -> None:
        order.append(running.state.sequence_id)  # type: ignore[attr-defined]
        forget(running)  # type: ignore[arg-type]

    world.dispatcher._forget = forgetting  # type: ignore[method-assign]
    world.run()
    for client in world.clients:
        check_equal(client)
    assert order[0] == "s0"
    assert counts(world)[0] > 0
    assert len(set(order)) == count


def test_a_slow_client_does_not_hold_others_memory() -> None:
    """It holds most of the pool, does not read, and is the oldest."""
    world = crowd(9, 3, faults=Faults(), max_unread=2)
    slow = world.clients[0]
    slow.request = replace(slow.request, reads_every=1.0, reads_at_once=1)
    ended: dict[str, float] = {}
    real = world._read

    def reading(client: object) -> None:
        real(client)  # type: ignore[arg-type]
        if client.done:  # type: ignore[attr-defined]
            ended.setdefault(client.request.sequence_id, world.clock())  # type: ignore[attr-defined]

    world._read = reading  # type: ignore[method-assign]
    world.run()
    for client in world.clients:
        check_equal(client)
    assert ended["s0"] > 5.0
    assert max(ended["s1"], ended["s2"]) < 3.0


def test_a_bounded_queue_refuses_the_excess_only() -> None:
    world = crowd(7, 12, faults=Faults(), max_running=3, max_waiting=4)
    world.run()
    refused = [client for client in world.clients if client.refused is not None]
    assert refused
    assert all(isinstance(client.refused, ResourceExhaustedError) for client in refused)
    for client in world.clients:
        if client.refused is None:
            check_equal(client)
