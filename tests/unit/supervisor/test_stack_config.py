"""Every setting of a process can be set on a stack, reaches it, and is not overridden there."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.core.types import AcceptanceMode
from paceline.supervisor import StackConfig, StackOptions
from paceline.supervisor.arguments import variable
from paceline.supervisor.stack import child_environment

PROCESSES: dict[str, Any] = {"target": TargetConfig, "draft": DraftConfig, "coordinator": CoordinatorConfig}
SET_BY_THE_STACK = {
    "worker_secret_file",
    "targets",
    "drafts",
    "tokenizer",
    "local_socket",
    "exit_with_parent",
    "handover_timeout",
    "join",
    "advertise",
    "join_port",
}
SET_BY_THE_STACK |= {"worker_tls_certificate", "worker_tls_key", "worker_tls_ca"}
CHOICES = {
    "attention_backend": "gathered",
    "generation_config": "none",
    "num_speculative_tokens_per_batch_size": "[[1, 4, 5]]",
    "log_format": "json",
    "otlp_traces_endpoint": "http://localhost:4317",
}
ELSEWHERE = {"tls_certificate", "tls_key", "tls_ca", "local_sockets", "host", "port"}
"""Of two processes by the same name, or with a meaning of its own for a stack."""

NAMES = {f.name for f in fields(StackOptions)}
ASKED = [
    (role, name)
    for role, cls in PROCESSES.items()
    for name in sorted({f.name for f in fields(cls)} & NAMES - ELSEWHERE - {"gpu_memory_utilization"})
]


def _of(config: StackConfig, role: str) -> Any:
    if role == "coordinator":
        return config.coordinator_config(("a:1",), ())
    return config.worker_config(role)


def _another(name: str, value: Any) -> Any:
    """A valid value that is not this one."""
    if name in CHOICES:
        return CHOICES[name]
    match value:
        case bool():
            return not value
        case Enum():
            return AcceptanceMode.BLOCK
        case int():
            return value - 1 if value > 1 else value + 1
        case float():
            return value / 2
    return 7 if value in (None, "auto") else "other"


@pytest.mark.parametrize(("role", "name"), ASKED)
def test_stack_settings_reach_the_process(role: str, name: str) -> None:
    value = _another(name, getattr(_of(StackConfig(), role), name))
    assert getattr(_of(StackConfig(**{name: value}), role), name) == value


@pytest.mark.parametrize(("role", "name"), ASKED)
def test_unset_stack_settings_are_the_process_defaults(role: str, name: str) -> None:
    by_default = next(f.default for f in fields(PROCESSES[role]) if f.name == name)
    if name.startswith("lookahead_") or name == "pre_verify":
        assert getattr(StackConfig(), name) is None, "it depends on the cores that there are"
    else:
        assert getattr(_of(StackConfig(), role), name) == by_default


@pytest.mark.parametrize("role", PROCESSES)
def test_every_process_setting_is_a_stack_setting(role: str) -> None:
    settings = {f.name for f in fields(PROCESSES[role])} - SET_BY_THE_STACK
    assert {name for name in settings if not {name, f"{role}_{name}"} & NAMES} == set()


def test_our_environment_variables_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would change defaults that a child's command line leaves out."""
    ours = {variable(f.name) for cls in PROCESSES.values() for f in fields(cls)}
    for name in ours:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "DEBUG")
    environment = child_environment({"PACELINE_PORT": "2"})
    assert {name: environment[name] for name in ours & environment.keys()} == {"PACELINE_PORT": "2"}
    assert environment["PACELINE_LOG_LEVEL"] == "DEBUG"


@pytest.fixture
def two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's folder of device nodes, of which it has none."""
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: (0, 1))
    monkeypatch.setattr("paceline.supervisor.devices._DEVICES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("devices", "values", "sequences"),
    [
        (["nvidia0"], {}, 256),
        (["nvidia0"], {"draft_device": "cpu"}, 256),
        (["nvidia0"], {"target_device": "cpu", "draft_device": "cpu"}, 1),
        (["nvidia0"], {"target": {"device": "cpu"}, "draft": {"device": "cpu"}}, 1),
        (["nvidia3", "nvidiactl"], {}, 256),  # a container was given the fourth one
        (["nvidiactl"], {}, 1),
        ([], {}, 1),
        ([], {"draft": {"device": "cuda"}}, 256),
    ],
)
def test_models_sharing_two_cores_draft_ahead_less(
    two_cores: Path, devices: list[str], values: dict[str, Any], sequences: int
) -> None:
    for device in devices:
        (two_cores / device).touch()
    assert StackConfig(**values).worker_config("draft").lookahead_sequences == sequences


def test_a_wsl_gpu_needs_nvidias_driver(two_cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = two_cores / "libcuda.so.1"
    (two_cores / "dxg").touch()
    monkeypatch.setattr("paceline.supervisor.devices._WSL_CUDA", driver)
    assert StackConfig().worker_config("draft").lookahead_sequences == 1
    driver.touch()
    assert StackConfig().worker_config("draft").lookahead_sequences == 256


@pytest.mark.parametrize(
    ("drafter", "cores", "threads"), [("model", 8, (4, 4)), ("ngram", 8, (7, 1)), ("ngram", 2, (1, 1))]
)
def test_a_drafter_without_a_model_leaves_its_cores(
    monkeypatch: pytest.MonkeyPatch, drafter: str, cores: int, threads: tuple[int, int]
) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: tuple(range(cores)))
    config = StackConfig(drafter=drafter)
    assert (config.target_config.threads, config.draft_config.threads) == threads


def test_each_draft_model_has_a_worker_of_its_own() -> None:
    config = StackConfig(
        draft_model=("a", "b", "c"), draft_port=7, draft_metrics_port=0, draft={"dtype": "float32"}
    )
    assert config.worker_roles == ("target", "draft", "draft-2", "draft-3")
    drafts = [config.worker_config(role) for role in config.worker_roles[1:]]
    assert [(draft.model, draft.port, draft.metrics_port) for draft in drafts] == [
        ("a", 7, 0),
        ("b", 8, 0),
        ("c", 9, 0),
    ]
    assert {draft.dtype for draft in drafts} == {"float32"}
    assert config.coordinator_config(("t:1",), ()).drafts_per_sequence == 3


def test_a_draft_model_more_than_propose_is_refused() -> None:
    assert StackConfig(draft_model=("a", "b"), drafts_per_sequence=3).drafts_per_sequence == 3
    for values, field in (
        ({"draft_model": ("a", "b"), "drafts_per_sequence": 1}, "drafts_per_sequence"),
        ({"draft_model": ("a", "b"), "acceptance": AcceptanceMode.BLOCK}, "draft_model"),
        ({"draft_model": tuple("abcde")}, "draft_model"),
        ({"draft_model": ("a", "none")}, "draft_model"),
    ):
        with refused(field):
            StackConfig(**values)  # type: ignore[arg-type]


def test_two_drafts_and_a_target_do_not_draft_ahead_on_two_cores(
    two_cores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.core_quota", lambda: 2.0)
    assert StackConfig().draft_config.lookahead_branches > 0
    assert StackConfig(draft_model=("a", "b")).draft_config.lookahead_branches == 0
