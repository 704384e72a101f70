"""Addresses and connection errors, against real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.cli import app as cli
from paceline.client import AsyncClient, Client, Tls
from paceline.client.reaching import Reach, checked_address, checked_addresses, name_of
from paceline.core.errors import InternalError, InvalidArgumentError, UnavailableError

Made = Callable[..., Path]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("gpu-a", "gpu-a:50151"),
        ("[::1]:7", "[::1]:7"),
        ("[::1]", "[::1]:50151"),
        ("::1", "[::1]:50151"),
        ("unix:/run/x", "unix:/run/x"),
        ("dns:///a:1", "dns:///a:1"),
    ],
)
def test_an_address_without_a_port_gets_the_default(written: str, meant: str) -> None:
    assert checked_address(written) == meant


@pytest.mark.parametrize(
    "written", [":5", "a:x", "a:0", "a:70000", "a:", "a b", "a:8000/v1", "a/v1", " ", "[::1"]
)
def test_an_invalid_address_is_refused(written: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be host:port"):
        checked_address(written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a", ("a:50151",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("a , b:2", ("a:50151", "b:2")),
        (["a", "[::1]:7"], ("a:50151", "[::1]:7")),
        (("a:1",), ("a:1",)),
        ("dns:a:1", ("dns:a:1",)),
        ("dns:a,b:2", ("dns:a:50151", "b:2")),
        ("dns:///a:1", ("dns:///a:1",)),
        ("ipv4:1.2.3.4:5,6.7.8.9:10", ("ipv4:1.2.3.4:5,6.7.8.9:10",)),
    ],
)
def test_several_addresses_are_read(written: Any, meant: tuple[str, ...]) -> None:
    assert checked_addresses(written) == meant


def test_only_dns_with_a_host_is_a_name() -> None:
    assert name_of("dns:a:1") == ("a", "1")
    assert [name_of(address) for address in ("a:1", "dns:///a:1", "unix:/run/x", "[::1]:7")] == [None] * 4


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ([], "at least one host:port"),
        ("", "must be host:port"),
        ("a:1,", "must be host:port"),
        ("a:1,,b:2", "must be host:port"),
        (["a:1", "b:x"], "must be host:port, got 'b:x'"),
        (["a:1", "b:2,c:3"], "must be host:port, got 'b:2,c:3'"),
        (["a:1", 5], "must be host:port"),
        (["a:1", None], "must be host:port"),
        ("dns:", "must be dns:host:port"),
        ("dns:unix:/x", "must be dns:host:port"),
        ("dns:a:x", "must be host:port"),
        ("a,a:50151", "has a:50151 twice"),
        (["dns:a", "dns:a:50151"], "has dns:a:50151 twice"),
        (5, "got int"),
        (b"a:1", "got bytes"),
        ({"a:1": 1}, "got dict"),
    ],
)
def test_an_invalid_list_is_refused(written: Any, reason: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match=reason) as caught:
            kind(written)
        assert caught.value.field == "address"


def test_a_url_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidArgumentError, match=r"http://127.0.0.1:8000 is a URL; use host:port"):
        Client("http://127.0.0.1:8000")


def test_other_errors_are_unchanged() -> None:
    reach = Reach("a:1", secure=False)
    for error in (UnavailableError("the queue is closed"), InternalError("Connection refused")):
        assert reach.told(error) is error


def test_a_reworded_error_keeps_its_last_index() -> None:
    error = UnavailableError("failed to connect to all addresses; Connection refused", 7)
    told = Reach("a:1", secure=False).told(error)
    assert isinstance(told, UnavailableError)
    assert told.last_index == 7


@pytest.fixture
def plain() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def http() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def said(address: str, **settings: Any) -> str:
    with Client(address, **settings) as client, pytest.raises(UnavailableError) as caught:
        client.status(timeout=30)
    return caught.value.message


def free_port() -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return int(there.getsockname()[1])


async def test_every_call_reports_a_missing_server() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert said(address).startswith(f"no server is listening at {address}")
    with Client(address) as client, pytest.raises(UnavailableError, match=r"^no server is listening at"):
        client.generate("x", timeout=30)
    async with AsyncClient(address) as asynchronous:
        for call in (asynchronous.status(timeout=30), asynchronous.generate("x", timeout=30)):
            with pytest.raises(UnavailableError, match=r"^no server is listening at"):
                await call


def test_an_unknown_host_is_reported() -> None:
    assert said("nosuchhost.invalid:5") == "the host name of nosuchhost.invalid:5 cannot be resolved"


def test_tls_on_a_plain_port_is_reported(plain: str) -> None:
    assert said(plain, tls=Tls()).startswith(f"{plain} does not use TLS")


def test_an_http_port_is_reported(http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseHTTPRequestHandler, "log_message", lambda *_: None)
    assert said(http).startswith(f"{http} answers HTTP/1, not gRPC")


@pytest.mark.parametrize(
    ("text", "secure", "meaning"),
    [
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", False, "refuses plain text"),
        ("ipv4:127.0.0.1:1: recvmsg:Connection reset by peer", False, "refuses plain text"),
        ("Secure read failed (Socket closed)", True, "may require a client certificate"),
        (
            "SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed",
            True,
            "set tls_ca to the authority's file",
        ),
        ("UNAUTHENTICATED: Hostname Verification Check failed.", True, "set tls_server_name"),
        ("connect: No route to host (113)", False, "cannot be reached over the network"),
    ],
)
def test_grpc_connection_errors_are_reworded(text: str, secure: bool, meaning: str) -> None:
    error = UnavailableError(f"failed to connect to all addresses; last error: {text}")
    assert meaning in Reach("a:1", secure=secure).told(error).message


def test_the_command_line_names_its_options(plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["status", "--address", plain, "--tls"], ["health", plain, "--tls"]):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 1
        assert f"error: {plain} does not use TLS: omit --tls-ca and" in capsys.readouterr().err
