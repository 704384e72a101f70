"""All processes of a stack keep the environment and folder of its start."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.security.secret import VARIABLE, WorkerSecret
from paceline.supervisor import ChildSpec, ChildStatus, StackConfig, serve_stack
from paceline.supervisor import stack as stack_module
from paceline.supervisor.folders import make_private


class Started(Exception):  # noqa: N818 - no error, an end
    """With what."""


class FakeSupervisor:
    """Starts nothing."""

    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> FakeSupervisor:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def start(self, specs: Sequence[Any], timeout: float) -> Any:
        raise Started(specs)


def specs_of(config: StackConfig) -> list[Any]:
    with pytest.raises(Started) as started, serve_stack(config):
        pass
    (specs,) = started.value.args
    return list(specs)


def test_processes_keep_the_environment_of_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever changes in this process meanwhile."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    started: list[ChildSpec] = []

    class Moving(FakeSupervisor):
        def start(self, specs: Sequence[ChildSpec], timeout: float) -> list[ChildStatus]:
            started.extend(specs)
            os.chdir(elsewhere)
            os.environ["PACELINE_TEST_IMPORTED"] = "1"
            return [ChildStatus(spec.role, 1, "127.0.0.1:1", ready=True, starts=1) for spec in specs]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TEST_IMPORTED", "0")
    monkeypatch.setattr(stack_module, "Supervisor", Moving)
    with serve_stack(StackConfig(environment={"PACELINE_TEST_MORE": "2"})):
        assert Path.cwd() == elsewhere
    assert [spec.role for spec in started] == ["target", "draft", "coordinator"]
    for spec in started:
        assert spec.folder == str(tmp_path)
        assert spec.environment["PACELINE_TEST_IMPORTED"] == "0"
        assert spec.environment["PACELINE_TEST_MORE"] == "2"


def test_a_removed_socket_folder_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after /tmp was tidied."""
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    own = str(tmp_path / "own.sock")
    target, draft = specs_of(StackConfig(local_sockets=True, draft={"local_socket": own}))
    socket = Path(target.command[target.command.index("--local-socket") + 1])
    assert target.private == socket.parent
    assert draft.private is None, "not ours to make"
    folder = tmp_path / "folder"
    for _ in range(2):
        make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_processes_of_a_stack_share_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    monkeypatch.delenv(VARIABLE, raising=False)
    seen = []
    for _ in range(2):
        specs = specs_of(StackConfig())
        (secret,) = {spec.environment[VARIABLE] for spec in specs}
        assert not any(secret in word for spec in specs for word in spec.command)
        seen.append(secret)
    assert seen[0] != seen[1]
    WorkerSecret(seen[0])


def test_a_secret_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    specs = specs_of(StackConfig())
    assert {spec.environment[VARIABLE] for spec in specs} == {"0123456789abcdef"}
