"""Options of channels, whoever opens them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from harness.refusals import refused

from paceline.core.security.tls import Tls
from paceline.rpc.security import credentials
from paceline.rpc.security.credentials import _options, check_files, open_aio_channel, open_channel

SECONDS = 20.0


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:50", True),
        ("[::1]:50", True),
        ("localhost:50", True),
        ("10.0.0.1:50", False),
        ("paceline.example:50", False),
        ("dns:///paceline.example:50", False),
    ],
)
def test_loopback_never_uses_a_proxy(address: str, loopback: bool) -> None:
    for tls in (None, Tls()):
        assert (("grpc.enable_http_proxy", 0) in _options(address, (), tls)) == loopback


def test_server_name_and_given_options_are_kept() -> None:
    options = _options("127.0.0.1:50", (("grpc.keepalive_time_ms", 5),), Tls(server_name="other"))
    assert {"grpc.keepalive_time_ms": 5, "grpc.ssl_target_name_override": "other"}.items() <= dict(
        options
    ).items()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on this machine, in an environment that names a proxy which lets nobody through."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("no_grpc_proxy", raising=False)
        server = grpc.server(ThreadPoolExecutor(1))
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_local_processes_are_reached_despite_a_proxy(address: str) -> None:
    with open_channel(address, (), None) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_local_processes_are_reached_from_an_event_loop(address: str) -> None:
    async with open_aio_channel(address, (), None) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=SECONDS
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("files", "field"), [(("certificate", "key"), "worker_tls_certificate"), (("ca",), "worker_tls_ca")]
)
def test_a_file_removed_after_reading_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], field: str
) -> None:
    """As while a certificate is replaced."""
    paths = {name: tmp_path / f"{name}.pem" for name in files}
    for path in paths.values():
        path.write_text("a certificate")
    monkeypatch.setattr(credentials, "read_bytes", lambda _field, file: Path(file).unlink())
    with refused(field, "cannot be read: No such file"):
        check_files(Tls(**{name: str(path) for name, path in paths.items()}), "worker_tls")
