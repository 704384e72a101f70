"""Configurations validate when they are built, and name the field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core import limits
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode

WORKER: dict[str, Any] = {"model": "embedded:target"}
COORDINATOR: dict[str, Any] = {"targets": ("127.0.0.1:1",), "tokenizer": "embedded:target"}


GOOD: dict[Any, dict[str, Any]] = {CoordinatorConfig: COORDINATOR, TargetConfig: WORKER, DraftConfig: WORKER}
INVALID: dict[Any, dict[str, list[Any]]] = {
    CoordinatorConfig: {
        "num_speculative_tokens": [-1, limits.MAX_SPECULATIVE_TOKENS + 1, "automatic"],
        "max_num_speculative_tokens": [0, limits.MAX_SPECULATIVE_TOKENS + 1],
        "tree_width": [0, limits.MAX_TREE_WIDTH + 1, "wide"],
        "max_tree_nodes": [0, limits.MAX_TREE_NODES + 1],
        "drafts_per_sequence": [0, limits.MAX_DRAFTS + 1],
        "targets": [()],
        "port": [-1, 65536],
        "http_port": [-1, 65536],
        "join_port": [-1, 65536],
        "draft_timeout": [0.0, math.nan],
        "target_timeout": [-1.0],
        "recovery_timeout": [0.0],
        "drain_timeout": [-1.0, math.nan, limits.MAX_REQUEST_SECONDS + 1.0],
        "max_running": [0, limits.MAX_RUNNING_SEQUENCES + 1],
        "max_waiting": [-1, limits.MAX_WAITING_SEQUENCES + 1],
        "log_format": ["xml"],
        "otlp_traces_endpoint": ["localhost:4317"],
        "otlp_traces_sampling_ratio": [1.5, -0.1],
    },
    TargetConfig: {
        "model": [""],
        "port": [65536],
        "dtype": ["float8"],
        "threads": [-1],
        "block_size": [0],
        "num_blocks": [0],
        "max_model_len": [1],
        "max_batch_tokens": [limits.MAX_SPECULATIVE_TOKENS],
        "max_sequences": [0],
        "lease_seconds": [0.0, math.nan],
        "handover_timeout": [-1.0, math.nan],
        "join": [("a",), ("a:1", "a:1"), ("a:1,b:2",)],
        "advertise": ["a:1"],
        "log_format": ["xml"],
        "otlp_traces_endpoint": ["localhost:4317"],
        "metrics_port": [70000],
    },
    DraftConfig: {
        "support_mass": [0.0, 1.1, math.nan],
        "support_bound": [0, limits.MAX_SUPPORT + 1],
        "port": [65536],
        "lookahead_branches": [-1, limits.MAX_CONTINUATIONS + 1],
        "lookahead_sequences": [0, limits.MAX_RUNNING_SEQUENCES + 1],
    },
}


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (cls, field, bad)
        for cls, fields in INVALID.items()
        for field, values in fields.items()
        for bad in values
    ],
)
def test_an_invalid_configuration_is_refused_by_field(cls: Any, field: str, value: Any) -> None:
    cls(**GOOD[cls])
    with refused(field) as caught:
        cls(**(GOOD[cls] | {field: value}))
    assert str(caught.value).startswith(f"{field}: ")


def test_speculation_needs_no_draft_worker() -> None:
    """Without one the coordinator decodes plainly, whatever K is."""
    assert CoordinatorConfig(**COORDINATOR, num_speculative_tokens=4).drafts == ()


def test_the_coordinator_chooses_k_by_default() -> None:
    assert CoordinatorConfig(**COORDINATOR).num_speculative_tokens == "auto"


@pytest.mark.parametrize("k", [0, limits.MAX_SPECULATIVE_TOKENS])
def test_the_bounds_of_k_are_allowed(k: int) -> None:
    assert CoordinatorConfig(**COORDINATOR, num_speculative_tokens=k).num_speculative_tokens == k


@pytest.mark.parametrize(("cls", "good"), GOOD.items())
def test_a_configuration_is_frozen_without_unknown_fields(cls: Any, good: dict[str, Any]) -> None:
    config = cls(**good)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1
    with pytest.raises(TypeError):
        cls(**good, unknown=1)
    with pytest.raises(InvalidArgumentError):
        dataclasses.replace(config, port=-1)


@pytest.mark.parametrize(("cls", "missing"), [(TargetConfig, "model"), (CoordinatorConfig, "tokenizer")])
def test_fields_without_default_are_required(cls: Any, missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        cls()


TABLE = "num_speculative_tokens_per_batch_size"


def test_a_table_of_draft_tokens_is_read() -> None:
    config = CoordinatorConfig(**COORDINATOR, **{TABLE: "[[1, 4, 5], [5, 16, 3], [17, 64, 0]]"})
    assert config.speculation_table == ((1, 4, 5), (5, 16, 3), (17, 64, 0))
    assert CoordinatorConfig(**COORDINATOR).speculation_table == ()


@pytest.mark.parametrize(
    ("table", "field", "why"),
    [
        ("[[1, 4, 5]", TABLE, "must be a JSON list"),
        ("{}", TABLE, "must be a list"),
        ("[]", TABLE, "must be a list"),
        ("[[1, 4]]", f"{TABLE}[0]", "must be [lowest, highest, K]"),
        ("[[2, 4, 5]]", f"{TABLE}[0]", "must begin with 1, got 2"),
        ("[[1, 4, 5], [6, 7, 1]]", f"{TABLE}[1]", "must begin with 5, got 6"),
        ("[[1, 0, 5]]", f"{TABLE}[0]", "must end with 1 or more, got 0"),
        ('[[1, 4, "auto"]]', f"{TABLE}[0]", "must have a number for K"),
        ("[[1, 4, 99]]", f"{TABLE}[0]", "must be between 0 and"),
        ("[[1, 4.5, 5]]", f"{TABLE}[0]", "must be an integer"),
    ],
)
def test_an_invalid_table_of_draft_tokens_is_refused(table: str, field: str, why: str) -> None:
    with refused(field) as error:
        CoordinatorConfig(**COORDINATOR, **{TABLE: table})
    assert why in error.value.description


def test_a_table_of_draft_tokens_needs_auto() -> None:
    with refused(TABLE):
        CoordinatorConfig(**COORDINATOR, num_speculative_tokens=4, **{TABLE: "[[1, 4, 5]]"})


@pytest.mark.parametrize("field", ["tree_width", "drafts_per_sequence"])
def test_block_acceptance_has_no_trees(field: str) -> None:
    block = COORDINATOR | {"acceptance": AcceptanceMode.BLOCK}
    CoordinatorConfig(**block, tree_width="auto")
    with refused(field):
        CoordinatorConfig(**block, **{field: 2})
