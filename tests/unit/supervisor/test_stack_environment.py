"""All processes of a stack have the same environment, whatever becomes of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.supervisor import StackConfig, serve_stack
from paceline.supervisor import stack as stack_module


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
