"""Configurations validate when they are built, and name the field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.core.errors import InvalidArgumentError

WORKER = {"model": "embedded:target"}
COORDINATOR = {"targets": ("127.0.0.1:1",), "tokenizer": "embedded:target"}


@pytest.mark.parametrize(
    ("cls", "good", "field", "value"),
    [
        (CoordinatorConfig, COORDINATOR, "num_speculative_tokens", -1),
        (CoordinatorConfig, COORDINATOR, "num_speculative_tokens", limits.MAX_SPECULATIVE_TOKENS + 1),
        (CoordinatorConfig, COORDINATOR, "num_speculative_tokens", "automatic"),
        (CoordinatorConfig, COORDINATOR, "max_num_speculative_tokens", 0),
        (CoordinatorConfig, COORDINATOR, "max_num_speculative_tokens", limits.MAX_SPECULATIVE_TOKENS + 1),
        (CoordinatorConfig, COORDINATOR, "targets", ()),
        (CoordinatorConfig, COORDINATOR, "port", -1),
        (CoordinatorConfig, COORDINATOR, "port", 65536),
        (CoordinatorConfig, COORDINATOR, "http_port", -1),
        (CoordinatorConfig, COORDINATOR, "http_port", 65536),
        (CoordinatorConfig, COORDINATOR, "draft_timeout", 0.0),
        (CoordinatorConfig, COORDINATOR, "draft_timeout", math.nan),
        (CoordinatorConfig, COORDINATOR, "target_timeout", -1.0),
        (CoordinatorConfig, COORDINATOR, "recovery_timeout", 0.0),
        (CoordinatorConfig, COORDINATOR, "drain_timeout", -1.0),
        (CoordinatorConfig, COORDINATOR, "drain_timeout", math.nan),
        (CoordinatorConfig, COORDINATOR, "drain_timeout", limits.MAX_REQUEST_SECONDS + 1.0),
        (CoordinatorConfig, COORDINATOR, "max_running", 0),
        (CoordinatorConfig, COORDINATOR, "max_running", limits.MAX_RUNNING_SEQUENCES + 1),
        (CoordinatorConfig, COORDINATOR, "max_waiting", -1),
        (CoordinatorConfig, COORDINATOR, "max_waiting", limits.MAX_WAITING_SEQUENCES + 1),
        (TargetConfig, WORKER, "model", ""),
        (TargetConfig, WORKER, "port", 65536),
        (TargetConfig, WORKER, "dtype", "float8"),
        (TargetConfig, WORKER, "threads", -1),
        (TargetConfig, WORKER, "block_size", 0),
        (TargetConfig, WORKER, "num_blocks", 0),
        (TargetConfig, WORKER, "max_model_len", 1),
        (TargetConfig, WORKER, "max_batch_tokens", limits.MAX_SPECULATIVE_TOKENS),
        (TargetConfig, WORKER, "max_sequences", 0),
        (TargetConfig, WORKER, "lease_seconds", 0.0),
        (TargetConfig, WORKER, "lease_seconds", math.nan),
        (DraftConfig, WORKER, "support_mass", 0.0),
        (DraftConfig, WORKER, "support_mass", 1.1),
        (DraftConfig, WORKER, "support_mass", math.nan),
        (DraftConfig, WORKER, "support_bound", 0),
        (DraftConfig, WORKER, "support_bound", limits.MAX_SUPPORT + 1),
        (DraftConfig, WORKER, "port", 65536),
        (DraftConfig, WORKER, "lookahead_branches", -1),
        (DraftConfig, WORKER, "lookahead_branches", limits.MAX_CONTINUATIONS + 1),
        (DraftConfig, WORKER, "lookahead_sequences", 0),
        (DraftConfig, WORKER, "lookahead_sequences", limits.MAX_RUNNING_SEQUENCES + 1),
    ],
)
def test_an_invalid_configuration_is_refused_by_field(
    cls: Any, good: dict[str, Any], field: str, value: Any
) -> None:
    cls(**good)
    with pytest.raises(ValueError, match=rf"^{field}: ") as caught:
        cls(**(good | {field: value}))
    assert isinstance(caught.value, InvalidArgumentError)
    assert caught.value.field == field


def test_speculation_needs_no_draft_worker() -> None:
    """Without one the coordinator decodes plainly, whatever K is."""
    assert CoordinatorConfig(**COORDINATOR, num_speculative_tokens=4).drafts == ()  # type: ignore[arg-type]


def test_the_coordinator_chooses_k_by_default() -> None:
    assert CoordinatorConfig(**COORDINATOR).num_speculative_tokens == "auto"  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, limits.MAX_SPECULATIVE_TOKENS])
def test_the_bounds_of_k_are_allowed(k: int) -> None:
    assert CoordinatorConfig(**COORDINATOR, num_speculative_tokens=k).num_speculative_tokens == k  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "good"), [(TargetConfig, WORKER), (DraftConfig, WORKER), (CoordinatorConfig, COORDINATOR)]
)
def test_a_configuration_is_frozen_without_unknown_fields(cls: Any, good: dict[str, Any]) -> None:
    config = cls(**good)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1
    with pytest.raises(TypeError):
        cls(**good, unknown=1)
    with pytest.raises(InvalidArgumentError):
        dataclasses.replace(config, port=-1)


@pytest.mark.parametrize(("cls", "missing"), [(TargetConfig, "model"), (CoordinatorConfig, "targets")])
def test_fields_without_default_are_required(cls: Any, missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        cls()


TABLE = "num_speculative_tokens_per_batch_size"


def test_a_table_of_draft_tokens_is_read() -> None:
    config = CoordinatorConfig(**COORDINATOR, **{TABLE: "[[1, 4, 5], [5, 16, 3], [17, 64, 0]]"})  # type: ignore[arg-type]
    assert config.speculation_table == ((1, 4, 5), (5, 16, 3), (17, 64, 0))
    assert CoordinatorConfig(**COORDINATOR).speculation_table == ()  # type: ignore[arg-type]


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
    with pytest.raises(InvalidArgumentError) as error:
        CoordinatorConfig(**COORDINATOR, **{TABLE: table})  # type: ignore[arg-type]
    assert error.value.field == field
    assert why in error.value.description


def test_a_table_of_draft_tokens_needs_auto() -> None:
    with pytest.raises(InvalidArgumentError) as error:
        CoordinatorConfig(**COORDINATOR, num_speculative_tokens=4, **{TABLE: "[[1, 4, 5]]"})  # type: ignore[arg-type]
    assert error.value.field == TABLE
