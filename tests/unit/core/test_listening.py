"""Ports and hosts are checked before anything is loaded."""

from __future__ import annotations

import socket

import pytest
from harness.refusals import refused

from paceline.core.errors import InvalidArgumentError
from paceline.core.system.listening import check_ports


def test_a_listening_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with refused("http_port", f"127.0.0.1:{port} is in use"):
            check_ports("host", "127.0.0.1", {"port": 0, "http_port": port})


def test_a_port_used_on_one_address_is_in_use_on_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match="is in use"):
            check_ports("host", "0.0.0.0", {"port": port})


def test_a_free_port_passes_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    check_ports("host", "127.0.0.1", {"port": port})
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["no such host", "nosuchhost.invalid", "a" * 70, "192.0.2.1"])
def test_a_foreign_host_is_refused_by_name(host: str) -> None:
    with refused("host", r"127\.0\.0\.1 for this machine") as caught:
        check_ports("host", host, {"port": 0})
    assert host in caught.value.description


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_hosts_of_this_machine_pass(host: str) -> None:
    check_ports("host", host, {"port": 0})
