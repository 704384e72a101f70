"""All processes of a stack have the same environment and working folder, whatever becomes of ours."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.secret import VARIABLE, WorkerSecret
from paceline.supervisor import StackConfig, serve_stack
from paceline.supervisor import stack as stack_module
from paceline.supervisor.folders import make_private


class Started(Exception):  # noqa: N818 - no error, an end
    """With what."""


class FakeForkServer:
    """While it loads, something else is imported that changes the environment."""

    def __init__(
        self, program: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.environment = dict(environment)

    def __enter__(self) -> FakeForkServer:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_until_loaded(self, timeout: float) -> None:
        os.environ["PACELINE_TEST_IMPORTED"] = "1"

    def start(self, *_: Any) -> Any:
        raise AssertionError


class FakeSupervisor:
    """Starts nothing."""

    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> FakeSupervisor:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def start(self, specs: Sequence[Any], timeout: float) -> Any:
        raise Started(specs)


def test_workers_are_forked_though_our_environment_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the bench imported its peers while the fork server loaded, and all workers were executed: ten
    seconds of imports each."""
    monkeypatch.setenv("PACELINE_TEST_IMPORTED", "0")
    servers: list[FakeForkServer] = []

    def fork_server(*of: Any) -> FakeForkServer:
        servers.append(FakeForkServer(*of))
        return servers[-1]

    monkeypatch.setattr(stack_module, "ForkServer", fork_server)
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    config = StackConfig(target_device="cpu", draft_device="cpu", environment={"PACELINE_TEST_MORE": "2"})
    with pytest.raises(Started) as started, serve_stack(config):
        pass
    (server,), (specs,) = servers, started.value.args
    assert server.environment["PACELINE_TEST_IMPORTED"] == "0"
    assert server.environment["PACELINE_TEST_MORE"] == "2"
    assert [spec.environment for spec in specs] == [server.environment] * 2
    assert all(spec.start == server.start for spec in specs)


def specs_of(config: StackConfig) -> list[Any]:
    with pytest.raises(Started) as started, serve_stack(config):
        pass
    (specs,) = started.value.args
    return list(specs)


def test_a_stack_s_processes_work_where_it_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Moving(FakeForkServer):
        def wait_until_loaded(self, timeout: float) -> None:
            os.chdir(elsewhere)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stack_module, "ForkServer", Moving)
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(StackConfig, "forks", lambda *_: True)
    specs = specs_of(StackConfig())
    assert Path.cwd() == elsewhere
    assert [spec.folder for spec in specs] == [str(tmp_path)] * 2


def test_the_folder_of_the_sockets_is_looked_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once: what tidies up /tmp took it away, and no worker could be started again."""
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    own = str(tmp_path / "own.sock")
    target, draft = specs_of(StackConfig(fork_workers=False, local_sockets=True, draft={"local_socket": own}))
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
        specs = specs_of(StackConfig(fork_workers=False))
        (secret,) = {spec.environment[VARIABLE] for spec in specs}
        assert not any(secret in word for spec in specs for word in spec.command)
        seen.append(secret)
    assert seen[0] != seen[1]
    WorkerSecret(seen[0])


def test_secret_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    specs = specs_of(StackConfig(fork_workers=False))
    assert {spec.environment[VARIABLE] for spec in specs} == {"0123456789abcdef"}


def test_shared_fork_server_gives_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of another environment than the fork server's own are not forked."""
    monkeypatch.setattr(stack_module, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(stack_module, "ForkServer", FakeForkServer)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(StackConfig, "forks", lambda *_: True)
    server: Any = stack_module.paceline_fork_server({})
    monkeypatch.setenv("PACELINE_TEST_IMPORTED", "1")
    with pytest.raises(Started) as started, serve_stack(StackConfig(), fork_server=server):
        pass
    (specs,) = started.value.args
    assert [spec.environment[VARIABLE] for spec in specs] == [server.environment[VARIABLE]] * 2
