"""Trees and several drafts: asked for, the server's, or not possible."""

from __future__ import annotations

from typing import Any

import pytest
from harness.refusals import refused

from coordinator.requests.machine_factory import Machines
from coordinator.requests.tree_setting import TreeSetting, tree_setting
from coordinator.speculation.arms import AUTO_WIDTH
from coordinator.speculation.policy import GoodputPolicy, Policy
from paceline.core.config import CoordinatorConfig
from paceline.core.types import (
    CHAIN,
    AcceptanceMode,
    SamplingParams,
    SequenceParams,
    SpeculationParams,
    TreeShape,
)
from paceline.core.validation import DraftTokens
from paceline.rpc.codec import GenerateCall
from paceline.v1 import common_pb2
from tests.unit.coordinator.machines import make_ledger

ONLY_CHAINS: dict[str, dict[str, Any]] = {
    "block mode": {"mode": AcceptanceMode.BLOCK},
    "no draft tokens": {"k": 0},
    "a context source": {"drafter": "suffix"},
}
TREES = {"tree_width": 3, "max_tree_nodes": 9, "drafts_per_sequence": 2}


def setting(
    server: dict[str, Any] | None = None,
    *,
    mode: AcceptanceMode = AcceptanceMode.COUPLED,
    temperature: float = 1.0,
    k: DraftTokens = 4,
    **asked: Any,
) -> TreeSetting:
    config = CoordinatorConfig(targets=("t:1",), tokenizer="t", **(server or {}))
    params = SequenceParams(SamplingParams(temperature=temperature, seed=1), mode, 1)
    return tree_setting(SpeculationParams(**asked), config, k, params)


def test_there_are_chains_of_one_draft_by_default() -> None:
    found = setting()
    assert (found.width, found.drafts, found.shape) == (1, 1, CHAIN)


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.REJECTION])
@pytest.mark.parametrize("k", [4, "auto"])
def test_a_request_decides_or_else_the_server(mode: AcceptanceMode, k: DraftTokens) -> None:
    assert setting(TREES, mode=mode, k=k) == TreeSetting(3, 9, 2)
    assert setting(TREES, mode=mode, k=k, tree_width=1, drafts_per_sequence=1).shape == CHAIN
    assert setting(TREES, mode=mode, k=k, tree_width=4).shape == TreeShape(4, 9)
    assert setting(mode=mode, k=k, **TREES) == TreeSetting(3, 9, 2)


def test_block_mode_takes_trees_at_temperature_0() -> None:
    assert setting(mode=AcceptanceMode.BLOCK, temperature=0.0, **TREES) == TreeSetting(3, 9, 2)


@pytest.mark.parametrize("because", ONLY_CHAINS.values(), ids=ONLY_CHAINS)
@pytest.mark.parametrize("name", TREES)
def test_what_cannot_be_followed_is_refused_by_name(because: dict[str, Any], name: str) -> None:
    with refused(name):
        setting(**because, **{name: TREES[name]})


@pytest.mark.parametrize("because", ONLY_CHAINS.values(), ids=ONLY_CHAINS)
def test_the_servers_trees_give_way(because: dict[str, Any]) -> None:
    found = setting(TREES, **because)
    assert (found.width, found.drafts, found.shape) == (1, 1, CHAIN)


@pytest.mark.parametrize("because", ONLY_CHAINS.values(), ids=ONLY_CHAINS)
def test_the_server_chooses_chains_where_there_is_nothing_else(because: dict[str, Any]) -> None:
    assert setting(**because, tree_width="auto").width == 1
    with refused("max_tree_nodes"):
        setting(**because, tree_width="auto", max_tree_nodes=8)


def test_a_bound_on_nothing_is_refused() -> None:
    for server in ({}, TREES):
        with refused("max_tree_nodes"):
            setting(server, tree_width=1, drafts_per_sequence=1, max_tree_nodes=8)
    with refused("max_tree_nodes"):
        setting(max_tree_nodes=8)
    assert setting(TREES, max_tree_nodes=8) == TreeSetting(3, 8, 2)
    assert setting(tree_width="auto", max_tree_nodes=8).nodes == 8
    assert setting(drafts_per_sequence=2, max_tree_nodes=8).nodes == 8


def policy_of(config: CoordinatorConfig, speculation: SpeculationParams) -> Policy:
    params = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 1)
    call = GenerateCall("", (1,), params.sampling, speculation)
    machines = Machines(config, None)  # type: ignore[arg-type]
    return machines.make(call, params, make_ledger(), common_pb2.WorkerInfo()).state.planner.policy


@pytest.mark.parametrize("k", [4, "auto"])
@pytest.mark.parametrize("table", ["", "[[1, 4, 5]]"])
def test_the_policy_gets_the_bounds(k: DraftTokens, table: str) -> None:
    config = CoordinatorConfig(targets=("t:1",), tokenizer="t", num_speculative_tokens_per_batch_size=table)
    speculation = SpeculationParams(num_speculative_tokens=k, tree_width=3, max_tree_nodes=9)
    policy = policy_of(config, speculation)
    assert policy.tree == TreeShape(3, 9)
    if isinstance(policy, GoodputPolicy):
        assert not policy.draws_chains
    else:
        assert policy.shape(2) == TreeShape(3, 9)


@pytest.mark.parametrize(("k", "bounds"), [("auto", TreeShape(AUTO_WIDTH, 9)), (4, CHAIN)])
def test_the_policy_chooses_chain_or_tree_with_k(k: DraftTokens, bounds: TreeShape) -> None:
    config = CoordinatorConfig(targets=("t:1",), tokenizer="t", tree_width="auto", max_tree_nodes=9)
    policy = policy_of(config, SpeculationParams(num_speculative_tokens=k))
    assert policy.tree == bounds
    assert policy.draws_chains
