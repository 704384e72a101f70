"""Bad options are reported by name before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused as field_refused

from paceline.cli import app as cli
from paceline.core.config import CoordinatorConfig, TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.supervisor import StackConfig, preflight, serve_stack
from paceline.supervisor import stack as stack_module

COORDINATOR: dict[str, Any] = {"targets": ("127.0.0.1:1",), "tokenizer": "embedded:target"}


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(stack_module, "Supervisor", started)


def refused(config: StackConfig) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as refusal, serve_stack(config):
        pass
    return refusal.value


@pytest.mark.parametrize("field", ["port", "http_port", "target_port", "draft_metrics_port"])
def test_an_occupied_port_is_reported_before_the_start(field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        error = refused(StackConfig(**{field: listening.getsockname()[1]}))
    assert error.field == field
    assert "is in use" in error.description


def test_a_disabled_http_port_is_not_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = CoordinatorConfig(http=False, http_port=listening.getsockname()[1], **COORDINATOR)
        preflight.check_coordinator(config)


def test_one_port_used_twice_is_refused() -> None:
    error = refused(StackConfig(port=40_001, draft_port=40_001))
    assert error.message == "draft_port: 40001 is also the value of --port"
    error = refused(StackConfig(draft_model=("embedded:draft",) * 2, draft_port=40_000, port=40_001))
    assert error.message == "draft_port: 40001 is also the value of --port"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"host": "nosuchhost.invalid"}, "host"),
        ({"api_keys": "/no/such"}, "api_keys"),
        ({"chat_template": "/no/such"}, "chat_template"),
        ({"corpus": "/no/such"}, "corpus"),
        ({"tls_certificate": "/no/such", "tls_key": "/no/such"}, "tls_certificate"),
        ({"certificates": "/no/such"}, "certificates"),
        ({"target_model": "./no/such"}, "target_model"),
        ({"draft_model": "./no/such"}, "draft_model"),
        ({"target_model": "embedded:foo"}, "target_model"),
        ({"target_threads": 100_000}, "target_threads"),
        ({"draft_device": "cuda:999"}, "draft_device"),
    ],
)
def test_impossible_settings_are_named_before_the_start(values: dict[str, Any], field: str) -> None:
    assert refused(StackConfig(**values)).field == field


def test_a_missing_certificate_file_is_named(tmp_path: Path) -> None:
    error = refused(StackConfig(certificates=str(tmp_path)))
    assert error.field == "certificates"
    assert f"{tmp_path}/target.pem" in error.description


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": "/no/such"}, "model"),
        ({"model": "m", "local_socket": "/no/such/s"}, "local_socket"),
        ({"model": "m", "port": 40_001, "metrics_port": 40_001}, "metrics_port"),
        ({"model": "m", "threads": 100_000}, "threads"),
    ],
)
def test_a_worker_is_checked_alone(values: dict[str, Any], field: str) -> None:
    with field_refused(field):
        preflight.check_worker(TargetConfig(**values))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["coordinator", "--target", "a:1", "--tokenizer", "/no/such"], "--tokenizer: /no/such: no such"),
        (["target-worker", "--model", "m", "--device", "gpu"], "--device: must be auto, cpu, cuda or cuda:N"),
        (["draft-worker", "--model", "/no/such"], "--model: /no/such: no such folder"),
        (["serve", "--device", "gpu"], "--device: must be auto, cpu, cuda or cuda:N"),
        (["serve", "--threads", "100000"], "--threads: 100000 threads are more than"),
        (["demo", "--device", "gpu"], "--device: must be auto, cpu, cuda or cuda:N"),
        (["demo", "--target-model", "/no/such"], "--target-model: /no/such: no such folder"),
        (["bench", "--device", "gpu"], "--device: must be auto, cpu, cuda or cuda:N"),
        (["bench", "--target-model", "/no/such"], "--target-model: /no/such: no such folder"),
        (["bench", "--threads", "100000"], "--threads: 100000 threads are more than"),
        (["bench", "--json", "/no/such/x"], "--json: /no/such/x cannot be written"),
        (["loadtest", "--json", "/no/such/x"], "--json: /no/such/x cannot be written"),
        (["loadtest", "--prompts", "/no/such"], "--prompts: /no/such cannot be read"),
    ],
)
def test_every_command_checks_first(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.connecting.AsyncClient", None)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {said}")


def test_an_invalid_template_is_reported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% if")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--port", "0", "--http-port", "0", "--chat-template", str(file)])
    assert "error: --chat-template: cannot be compiled" in capsys.readouterr().err
