"""Chain or tree in a closed loop; trials count in the throughput."""

from __future__ import annotations

import json
from statistics import mean

import pytest
from harness.tiers import mostly_full

from coordinator.speculation.draft_trees import TreeGains
from tests.sim import tree_choice
from tests.sim.policy import HEAVY, always
from tests.sim.tree_choice import (
    SETTINGS,
    Setting,
    always_tree,
    both,
    chains_alone,
    fixed,
    loop_of,
    policies,
    rate,
)

SEEDS = range(1, 5)
GROUPS = {
    "few": ("slow target, 1", "two cores, 1"),
    "loaded": ("fast draft, 4", "two cores, 8", "costly"),
}


@pytest.mark.full
@pytest.mark.parametrize("group", ["few", "loaded"])
def test_the_choice_costs_little_against_the_better_of_chain_and_tree(group: str) -> None:
    """In each setting within the noise of its seeds, and on average 2 %."""
    shares = []
    for name, setting in SETTINGS.items():
        if name.startswith(GROUPS[group]):
            rates = policies(setting, SEEDS)
            shares.append(rates["both"] / max(rates["chains_alone"], rates["trees_alone"]))
    assert min(shares) >= 0.95
    assert mean(shares) >= 0.98


@pytest.mark.parametrize("name", mostly_full(["slow target, 1, alike", "two cores, 1, mixed"], count=1))
def test_where_trees_win_the_choice_has_most_of_their_gain(name: str) -> None:
    best = fixed(SETTINGS[name], SEEDS)
    assert best["tree"] > 1.1 * best["chain"]
    assert rate(SETTINGS[name], both, SEEDS) >= 0.92 * best["tree"]


@pytest.mark.parametrize("requests", [16, 64])
def test_no_trees_under_load_where_rows_cost(requests: int) -> None:
    setting = Setting(HEAVY, requests, "alike")
    loop, trees = loop_of(setting, both, 1), 0.0
    loop.run(0.01)
    while loop.now < 20.0:
        before = loop.now
        loop.resume(loop.now + 0.05)
        trees += (loop.now - before) * (loop.controller.arm in loop.controller.arms.trees)
    assert trees < 0.03 * loop.now
    assert rate(setting, both, SEEDS) >= 0.97 * rate(setting, chains_alone, SEEDS)


@pytest.mark.planted
def test_trees_under_load_are_noticed() -> None:
    setting = Setting(HEAVY, 16, "alike")
    assert rate(setting, always_tree(4, 8), [1]) < 0.9 * rate(setting, always(0), [1])


@pytest.mark.planted
def test_a_policy_blind_to_what_trees_bring_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeGains, "expected", lambda self, chain: [chain[arm.depth] for arm in self._trees])
    setting = SETTINGS["slow target, 1, alike"]
    assert rate(setting, both, SEEDS) < 0.9 * rate(setting, always_tree(4, 32), SEEDS)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    tree_choice.main(["--seeds", "1", "--only", "costly rows, 4", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == {"plain", "chain", "tree", "chains_alone", "trees_alone", "both", "share"}
