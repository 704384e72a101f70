"""Roles and methods, and invalid TLS settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core.config import CoordinatorConfig, TargetConfig
from paceline.core.errors import PermissionDeniedError
from paceline.core.security.tls import Tls
from paceline.rpc.security.auth import PeerRole, check_call, is_local_call, is_open, roles_of
from paceline.v1 import admin_pb2, draft_pb2, fleet_pb2, generation_pb2, target_pb2

METHODS = [
    f"/{service.full_name}/{method.name}"
    for package in (draft_pb2, generation_pb2, admin_pb2, fleet_pb2, target_pb2)
    for service in package.DESCRIPTOR.services_by_name.values()
    for method in service.methods
] + [
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/nobody/Knows",
    "",
    "/metrics",
    "/v1/models",
]
OPEN = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/health", "/ping"]
ALLOWED = {
    "target": {PeerRole.COORDINATOR},
    "draft": {PeerRole.COORDINATOR},
    "coordinator": {PeerRole.COORDINATOR, PeerRole.CLIENT},
    "fleet": {PeerRole.TARGET, PeerRole.DRAFT},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("server", ALLOWED)
def test_every_method_requires_an_allowed_role(server: str, method: str) -> None:
    for role in PeerRole:
        if role in ALLOWED[server]:
            check_call(server, ["host.example", role.dns_name], method)
        else:
            with pytest.raises(PermissionDeniedError):
                check_call(server, ["host.example", role.dns_name], method)
    for names in (
        [],
        ["host.example"],
        ["coordinator"],
        ["*.paceline.internal"],
        ["x.coordinator.paceline.internal"],
    ):
        with pytest.raises(PermissionDeniedError):
            check_call(server, names, method)


@pytest.mark.parametrize("method", OPEN)
@pytest.mark.parametrize("server", ALLOWED)
def test_health_needs_no_role(server: str, method: str) -> None:
    check_call(server, [], method)


@pytest.mark.parametrize(
    "method",
    [*METHODS, "/health/", "/healthz", "/v1/health", "/ping/", "/pings", "/grpc.health.v1.Healthy/Check"],
)
def test_only_health_is_open(method: str) -> None:
    assert not is_open(method)


def test_roles_are_full_names_in_any_case() -> None:
    assert roles_of(["Coordinator.Paceline.Internal", "draft.paceline.internal"]) == {
        PeerRole.COORDINATOR,
        PeerRole.DRAFT,
    }


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tls_certificate": "c"}, "tls_key"),
        ({"tls_key": "k"}, "tls_certificate"),
        ({"tls_ca": "a"}, "tls_certificate"),
        ({"tls_certificate": "c", "tls_key": "k"}, "tls_ca"),
        ({"tls_certificate": "c", "tls_key": "k", "tls_ca": "a", "local_socket": "s"}, "local_socket"),
    ],
)
def test_a_worker_needs_all_tls_files_or_none(values: dict[str, str], field: str) -> None:
    with refused(field):
        TargetConfig(model="m", **values)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tls_certificate": "c"}, "tls_key"),
        ({"tls_ca": "a"}, "tls_certificate"),
        ({"worker_tls_certificate": "c"}, "worker_tls_key"),
        ({"worker_tls_key": "k"}, "worker_tls_certificate"),
        ({"worker_tls_ca": "a"}, "worker_tls_certificate"),
        ({"worker_tls_certificate": "c", "worker_tls_key": "k"}, "worker_tls_ca"),
        ({"max_request_seconds": 0.0}, "max_request_seconds"),
    ],
)
def test_a_coordinator_needs_each_tls_set_whole(values: dict[str, str], field: str) -> None:
    with refused(field):
        CoordinatorConfig(targets=("a:1",), tokenizer="t", **values)  # type: ignore[arg-type]


def test_clients_may_go_without_certificates() -> None:
    config = CoordinatorConfig(targets=("a:1",), tokenizer="t", tls_certificate="c", tls_key="k")
    assert config.tls == Tls(certificate="c", key="k")
    assert config.worker_tls is None


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("unix:", True),
        ("unix:%00name", True),
        ("ipv4:10.0.0.7:4711", False),
        ("ipv6:%5B2001:db8::1%5D:4711", False),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4711", False),
        ("localhost:4711", False),
        ("", False),
    ],
)
def test_only_callers_on_this_machine_are_local(peer: str, local: bool) -> None:
    context: Any = SimpleNamespace(peer=lambda: peer)
    assert is_local_call(context) is local
