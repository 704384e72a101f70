"""The invariants of docs/architecture.md, one test each or more, named after them.

`World` checks 1, 2, 3 and 5 at every step of every simulation; here they are met on purpose.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.tiers import mostly_full

from paceline.core.errors import InternalError, ResourceExhaustedError, UnavailableError
from paceline.core.types import AcceptanceMode, FinishReason, SamplingParams
from paceline.core.validation import AUTO
from tests.sim.reference import plain_decoding
from tests.sim.scenarios import DRAFT, EOS, TARGET, VOCAB, check_equal, random_world
from tests.sim.toys import ToyModel
from tests.sim.world import Client, Faults, Request, World


def request(
    name: str = "s0", *, prompt: tuple[int, ...] = (1, 2, 3), k: int = 3, **sampling: object
) -> Request:
    """A coupled request of 20 tokens without ends."""
    values = {"seed": 7, "max_tokens": 20, "ignore_eos": True, **sampling}
    return Request(name, prompt, SamplingParams(**values), k=k)  # type: ignore[arg-type]


def requests(n: int, **options: object) -> list[Request]:
    return [request(f"s{i}", prompt=(i % VOCAB, 2, i % 5), seed=i, **options) for i in range(n)]  # type: ignore[arg-type]


def served(
    *asked: Request, draft: ToyModel = DRAFT, seed: int = 1, **options: object
) -> tuple[World, list[Client]]:
    """Run a service to its end."""
    options.setdefault("max_model_len", 40)
    world = World(seed, target=TARGET, draft=draft, eos=EOS, **options)  # type: ignore[arg-type]
    clients = [world.submit(one) for one in asked]
    world.run()
    return world, clients


@pytest.mark.parametrize("mode", AcceptanceMode)
def test_invariant_1_the_target_cache_lacks_only_the_last_token(mode: AcceptanceMode) -> None:
    world, clients = served(*[replace(r, mode=mode) for r in requests(6, max_tokens=30)])
    rounds = sum(c.running.state.stats.num_rounds for c in clients if c.running is not None)
    assert world.verdicts_checked == rounds
    accepted = [c.running.state.stats.num_accepted_draft_tokens for c in clients if c.running is not None]
    assert sum(accepted) > 30, "the draft is good enough for roll-backs of every depth"


@pytest.mark.parametrize("seed", mostly_full(range(40), count=12))
def test_invariant_2_committed_tokens_are_emitted_in_order(seed: int) -> None:
    world = random_world(10_000 + seed, choosing=False)
    world.run()
    for client in world.clients:
        ledger = client.running.state.ledger
        generated = ledger.token_ids[ledger.prompt_length :]
        assert client.token_ids == generated[: len(client.token_ids)]
        if not client.left:
            assert client.error is None
            assert client.finish is not None
            assert client.token_ids == generated


def test_invariant_2_an_error_names_the_last_index() -> None:
    _, (client,) = served(request(max_tokens=30), faults=Faults(events=[(0.05, "target gone")]))
    assert isinstance(client.error, UnavailableError)
    assert client.error.last_index == len(client.token_ids) - 1
    assert client.token_ids, "it had begun"


def test_invariant_3_verdicts_are_clipped_before_the_commit() -> None:
    clipped = 0
    for ends in ({"ignore_eos": False}, {"stop": ("ab", "ccd", "e")}, {"stop_token_ids": (2,)}, {}):
        asked = [replace(r, k=5) for r in requests(8, temperature=0.7, **ends)]
        world, clients = served(*asked, draft=TARGET)
        for client in clients:
            check_equal(client)
        clipped += world.clipped
    assert clipped > 5, "some ends must lie inside a verdict"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_invariant_4_a_seed_fixes_the_tokens(temperature: float) -> None:
    def tokens(asked: list[Request], **options: object) -> list[tuple[int, ...]]:
        return [tuple(client.token_ids) for client in served(*asked, **options)[1]]  # type: ignore[arg-type]

    base = requests(5, temperature=temperature)
    want = [plain_decoding(TARGET, r.prompt, r.sampling, max_model_len=40).token_ids for r in base]
    assert tokens(base, num_drafts=0) == want
    for draft in (DRAFT, TARGET, ToyModel(VOCAB, seed=99)):
        for k in (1, 2, 5, AUTO):
            assert tokens([replace(r, k=k) for r in base], draft=draft) == want
    assert [tokens([one])[0] for one in base] == want, "alone as in a batch"
    assert tokens([replace(r, k=i) for i, r in enumerate(base)], num_targets=2, num_drafts=2, seed=5) == want
    assert (
        tokens([replace(r, mode=AcceptanceMode.COUPLED) for r in base], target_blocks=14, draft_blocks=3)
        == want
    )
    faults = Faults(0.5, 0.01, [(0.02, "target restart"), (0.04, "draft restart"), (0.06, "target cut")])
    assert tokens(base, num_targets=2, faults=faults) == want


@pytest.mark.parametrize("blocks", [12, 20])
def test_invariant_5_idle_pools_are_whole_and_slots_unshared(blocks: int) -> None:
    faults = Faults(0.3, 0.004, [(0.01 * i, "draft crash") for i in range(1, 6)])
    _, clients = served(*requests(6), target_blocks=blocks, draft_blocks=blocks // 2, faults=faults)
    for client in clients:
        check_equal(client)


def test_invariant_6_losing_a_draft_worker_costs_speed_only() -> None:
    asked = requests(4, max_tokens=25)
    world, clients = served(*asked, draft=TARGET, faults=Faults(events=[(0.03, "draft gone")]))
    healthy, _ = served(*asked, draft=TARGET)
    for client in clients:
        check_equal(client)

    def rounds(of: World) -> int:
        return sum(c.running.state.stats.num_rounds for c in of.clients if c.running is not None)

    assert rounds(world) > rounds(healthy)


@pytest.mark.parametrize("kind", ["gone", "restart", "cut", "hang", "drain"])
def test_invariant_6_losing_a_target_worker_costs_a_prefill_only(kind: str) -> None:
    asked = requests(4, max_tokens=25)
    world, clients = served(*asked, num_targets=2, faults=Faults(events=[(0.05, f"target {kind}")]))
    for client in clients:
        check_equal(client)
        stats = client.running.state.stats
        # No round is lost: every one was judged and counted exactly once.
        assert stats.num_rounds + stats.num_accepted_draft_tokens == len(client.token_ids)
    assert all(not link.load for link in world.targets)


@pytest.mark.parametrize("how", ["nan", "crash", "out of memory"])
def test_invariant_7_one_requests_failure_ends_no_other(how: str) -> None:
    asked = requests(5, max_tokens=12)
    poison = request("bad", prompt=(4, 4, 4, 4, 4, 4), max_tokens=12)
    world = World(2, target=TARGET, draft=DRAFT, eos=EOS, target_blocks=14, max_model_len=40)
    runner = world.targets[0].worker.runner
    if how == "nan":
        runner.spoil = lambda prefix: prefix[:6] == [4] * 6 and len(prefix) == 8
    elif how == "crash":
        runner.crash_on = lambda token_ids: RuntimeError() if token_ids[:3] == [4, 4, 4] else None
    else:
        world.max_model_len = world.targets[0].known.max_model_len = 100
        core = world.targets[0].worker.core
        core._limits = replace(core._limits, max_model_len=100)
        poison = request("bad", prompt=(4,) * 60, max_tokens=12)
    others = [world.submit(one) for one in asked]
    bad = world.submit(poison)
    world.run()
    assert isinstance(bad.error, ResourceExhaustedError if how == "out of memory" else InternalError)
    for client in others:
        check_equal(client)


def test_invariant_7_nan_in_the_draft_fails_no_request() -> None:
    asked = requests(4)
    world = World(3, target=TARGET, draft=DRAFT, eos=EOS, max_model_len=40)
    world.drafts[0].worker.runner.spoil = lambda prefix: len(prefix) % 5 == 0
    clients = [world.submit(one) for one in asked]
    world.run()
    for client in clients:
        check_equal(client)


def test_invariant_8_the_queue_is_bounded() -> None:
    _, clients = served(*requests(6), max_running=2, max_waiting=2)
    refused = [client for client in clients if client.refused is not None]
    assert len(refused) == 2
    for client in clients:
        if client in refused:
            assert isinstance(client.refused, ResourceExhaustedError)
            assert client.running is None
        else:
            check_equal(client)


def test_invariant_8_unread_tokens_are_bounded() -> None:
    bound, k = 4, 5
    slow = [replace(r, k=k, reads_every=0.05, reads_at_once=1) for r in requests(2, max_tokens=36)]
    fast = replace(request("fast", max_tokens=36), k=k)
    world, clients = served(*slow, fast, draft=TARGET, max_unread=bound)
    for client in clients:
        check_equal(client)
        # The commit that passes the bound, and the round that had begun by then.
        assert client.most_unread <= bound + 2 * (k + 1)
    assert max(client.most_unread for client in clients[:2]) > bound
    assert world.clock() > 0.2


def test_invariant_8_a_workers_sequences_are_bounded() -> None:
    _, clients = served(*requests(6), max_sequences=2)
    for client in clients:
        check_equal(client)
        assert client.finish.reason is FinishReason.LENGTH
