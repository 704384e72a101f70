"""IPv6 hosts with and without brackets: announced addresses are usable."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from coordinator.api.http.server.server import HttpServer
from paceline.rpc.server.server import host_in_address
from paceline.supervisor.announcement import split_address
from tests.unit.rpc.serving import HANG, NOT_SERVING, health, serving


@pytest.fixture(params=["::1", "[::1]"])
def host(request: pytest.FixtureRequest) -> str:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    return str(request.param)


@pytest.mark.parametrize(
    ("given", "in_address"),
    [
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("::", "[::]"),
        ("fe80::1%eth0", "[fe80::1%eth0]"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
    ],
)
def test_only_ipv6_addresses_get_brackets(given: str, in_address: str) -> None:
    assert host_in_address(given) == in_address


async def test_a_host_without_brackets_is_listened_on(host: str) -> None:
    """As `--host ::1`."""
    async with serving("test", host) as server, health(server) as client:
        assert split_address(server.address)[0] == "[::1]"
        assert await client.check() == NOT_SERVING


async def test_the_http_address_is_valid_in_a_url(host: str) -> None:
    """As `http://[::1]:8000`."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(app, host, 0)
    await server.start()
    try:
        place, port = split_address(server.address)
        assert place == "[::1]"
        async with asyncio.timeout(HANG):
            reader, writer = await asyncio.open_connection("::1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"204"
            writer.close()
    finally:
        await server.stop(1)
