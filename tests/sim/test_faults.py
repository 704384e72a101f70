"""Random faults: clients get the tokens of plain decoding.

A failing seed says how to replay it; PACELINE_SIM_SEEDS=0:5000 runs thousands.
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from harness.tiers import mostly_full

from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit
from coordinator.sequence.round_record import RoundRecord
from tests.sim.scenarios import branching_world, check_equal, foreseeing_world, random_world
from tests.sim.world import CheckedDispatcher, SimulationError, World, chosen_seeds


def run_and_check(world: World, seed: int) -> None:
    world.run()
    for client in world.clients:
        try:
            check_equal(client)
        except SimulationError as error:
            trace = "\n".join(world.trace)
            raise SimulationError(f"{error}\nreplay with PACELINE_SIM_SEEDS={seed}\n{trace}") from None


@pytest.mark.parametrize("seed", mostly_full(chosen_seeds(300), count=60))
def test_faults_change_no_token(seed: int) -> None:
    run_and_check(random_world(seed), seed)


@pytest.mark.parametrize("seed", mostly_full(chosen_seeds(60), count=20))
def test_rounds_begun_ahead_change_no_token(seed: int) -> None:
    run_and_check(foreseeing_world(seed), seed)


@pytest.mark.parametrize("seed", mostly_full(chosen_seeds(200), count=50))
def test_trees_of_several_drafts_change_no_token(seed: int) -> None:
    run_and_check(branching_world(seed), seed)


def test_targets_judge_trees_of_one_and_of_several_drafts() -> None:
    """The worlds above have all kinds of rounds, and paths that leave the first child."""
    judged: Counter[tuple[str, int]] = Counter()
    ranks: Counter[int] = Counter()

    class Looking(CheckedDispatcher):
        def _tell_of(self, running: Running, commit: Commit | None, record: RoundRecord | None) -> None:
            if record is not None and record.num_draft:
                shape = "chain" if record.num_draft == record.depth else "tree"
                judged[shape, len(running.drafts)] += 1
                ranks.update(record.accepted_ranks)
            super()._tell_of(running, commit, record)

    with mock.patch("tests.sim.world.CheckedDispatcher", Looking):
        for seed in range(24):
            branching_world(seed).run()
    assert min(judged[shape, drafts] for shape in ("chain", "tree") for drafts in (1, 2, 3)) > 10
    assert ranks[1] > 20


@pytest.mark.parametrize(("num_drafts", "share"), [(1, 1 / 5), (0, 1 / 2)], ids=["drafted", "plain"])
def test_many_rounds_begin_ahead(num_drafts: int, share: float) -> None:
    rounds = ahead = 0
    for seed in range(12):
        world = foreseeing_world(seed, num_drafts)
        world.run()
        ahead += world.went_on
        rounds += sum(c.running.state.stats.num_rounds for c in world.clients if c.running is not None)
    assert ahead > share * rounds


@pytest.mark.parametrize("seed", mostly_full(chosen_seeds(40), count=12))
def test_plain_rounds_begun_ahead_change_no_token(seed: int) -> None:
    run_and_check(foreseeing_world(seed, num_drafts=0), seed)


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_a_seed_replays_exactly(seed: int) -> None:
    def history() -> tuple[list[str], float, list[list[int]]]:
        world = random_world(seed)
        world.run()
        return list(world.trace), world.clock(), [client.token_ids for client in world.clients]

    assert history() == history()


def test_a_failing_seed_is_named_with_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "check_verdict", lambda self, worker, event: 1 / 0)
    with pytest.raises(SimulationError, match="PACELINE_SIM_SEEDS=5") as caught:
        random_world(5).run()
    assert "VerifyRound(" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "seeds"),
    [("", range(300)), ("17", range(17, 18)), ("0:5000", range(5000)), ("10:20", range(10, 20))],
)
def test_seeds_are_chosen_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, seeds: range
) -> None:
    monkeypatch.setattr("tests.sim.world.SEEDS", value)
    assert chosen_seeds(300) == seeds
