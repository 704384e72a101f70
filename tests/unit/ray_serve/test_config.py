"""Arguments of the Ray application: every field is honoured or refused by its name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.ray.config import (
    SET_BY_COORDINATOR,
    SET_BY_WORKER,
    AppArgs,
    CoordinatorTier,
    DraftTier,
    TargetTier,
    coordinator_config,
    worker_config,
)


def args(**values: Any) -> AppArgs:
    return AppArgs.model_validate(values)


@pytest.mark.parametrize(
    ("tier", "config", "without"),
    [
        (TargetTier, TargetConfig, SET_BY_WORKER),
        (DraftTier, DraftConfig, SET_BY_WORKER),
        (CoordinatorTier, CoordinatorConfig, SET_BY_COORDINATOR),
    ],
)
def test_a_tier_has_the_fields_of_its_process(tier: type, config: type, without: frozenset[str]) -> None:
    named = {each.name for each in fields(config)}
    assert without < named
    assert named - without < tier.model_fields.keys()  # type: ignore[attr-defined]


def test_the_embedded_target_has_the_embedded_draft() -> None:
    assert {role: tier.settings for role, tier in args().workers.items()} == {
        "target": {"model": "embedded:target"},
        "draft": {"model": "embedded:draft"},
    }
    assert args(draft=None).workers.keys() == {"target"}
    assert args(target={"model": "mine"}).workers.keys() == {"target"}


def test_settings_reach_their_processes() -> None:
    given = args(
        target={"model": "mine", "num_blocks": 7},
        draft={"model": "small", "lookahead_branches": 2},
        coordinator={"num_speculative_tokens": 3, "acceptance": "block", "drain_timeout": 4},
    )
    draft = worker_config("draft", given.workers["draft"].settings, "10.0.0.1")
    assert isinstance(draft, DraftConfig)
    assert (draft.host, draft.lookahead_branches, draft.exit_with_parent) == ("10.0.0.1", 2, True)
    assert worker_config("target", given.workers["target"].settings, "a").num_blocks == 7
    config = coordinator_config(given.coordinator_settings, "10.0.0.2", ("t:1",), ("d:1",))
    assert (config.tokenizer, config.num_speculative_tokens, config.drain_timeout) == ("mine", 3, 4.0)
    assert config.acceptance.value == "block"
    assert given.coordinator.drain_timeout == 4
    named = args(target={"model": "mine"}, coordinator={"tokenizer": "other"})
    assert named.coordinator_settings["tokenizer"] == "other"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"targets": {}}, "targets"),
        ({"target": {"model": "m", "tensor_parallel_size": 2}}, "target.tensor_parallel_size"),
        ({"target": {"model": "m", "host": "a"}}, "target.host"),
        ({"target": {"model": "m", "lookahead_branches": 2}}, "target.lookahead_branches"),
        ({"target": {"model": "m", "threads": -1}}, "target.threads: must not be negative"),
        ({"target": {"num_blocks": 2}}, "target.model"),
        ({"draft": {"model": "m", "support_mass": 2}}, "draft.support_mass: must be in"),
        ({"coordinator": {"http_port": 80}}, "coordinator.http_port"),
        ({"coordinator": {"draft_timeout": 0}}, "coordinator.draft_timeout: must be positive"),
        (
            {"target": {"model": "m", "deployment_config": {"request_router_config": {}}}},
            "deployment_config.request_router_config: is set by Paceline",
        ),
        (
            {"target": {"model": "m", "deployment_config": {"placement_group_bundles": []}}},
            "deployment_config.placement_group_bundles: is given as",
        ),
        (
            {"target": {"model": "m", "placement_group_config": {"bundles": [{"GPU": 1}], "strategy": "X"}}},
            "target.placement_group_config.strategy",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as raised:
        args(**values)
    assert named in str(raised.value)


@pytest.mark.slow
def test_paceline_does_not_import_ray() -> None:
    code = """
import sys
import paceline, paceline.cli, paceline.ray, paceline.ray.config, paceline.ray.directory, coordinator.main
assert not [name for name in sys.modules if name.split(".")[0] == "ray"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
