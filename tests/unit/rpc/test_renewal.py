"""Certificates that change while a port serves: new connections use the new ones."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.http.server.encoding import JsonResponse
from paceline.certificates import make_certificates
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.tls import Tls
from paceline.rpc.security.renewal import Renewed
from tests.unit.http.port import served
from tests.unit.rpc.serving import serving

HANG = 60.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The beginning of HTTP/2, which the HTTP port answers with an error."""


def tls_in(folder: Path, *, ca: bool = False) -> Tls:
    files = {"certificate": "coordinator.pem", "key": "coordinator.key"} | ({"ca": "ca.pem"} if ca else {})
    return Tls(**{name: str(folder / file) for name, file in files.items()})


@asynccontextmanager
async def grpc_port(tls: Tls) -> AsyncIterator[str]:
    async with serving(tls=tls) as server:
        yield server.address


@asynccontextmanager
async def http_port(tls: Tls) -> AsyncIterator[str]:
    async with served(JsonResponse({"well": True}), tls=tls) as server:
        yield server.address


Port = Callable[[Tls], AbstractAsyncContextManager[str]]
both = pytest.mark.parametrize("port", [grpc_port, http_port], ids=["gRPC", "HTTP"])


async def shown(address: str, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown. Raises OSError where it is refused."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(HANG):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.write(HELLO)
        try:
            # With TLS 1.3 a server's refusal comes after the client's handshake.
            answer = await reader.read(1)
        finally:
            writer.close()
    if not answer:
        raise ConnectionResetError("the connection is refused")
    assert isinstance(certificate, bytes)
    return certificate


def anybody() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def holder(folder: Path) -> ssl.SSLContext:
    context = anybody()
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context


def der(file: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(file.read_text())


def renew(folder: Path, other: Path, *names: str) -> None:
    """Each file is replaced in one step, as tools that renew do."""
    for name in names:
        new = folder / f".{name}"
        shutil.copy(other / name, new)
        new.replace(folder / name)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Files that are used, and others of another authority."""
    for name in ("used", "new"):
        make_certificates(tmp_path / name, ["coordinator"])
        make_certificates(tmp_path / name, ["client"])
    return tmp_path / "used", tmp_path / "new"


@both
async def test_a_renewed_certificate_is_used_without_restart(
    port: Port, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    used, new = folders
    before, after = der(used / "coordinator.pem"), der(new / "coordinator.pem")
    async with port(tls_in(used)) as address:
        assert await shown(address, anybody()) == before
        renew(used, new, "coordinator.pem", "coordinator.key")
        assert await shown(address, anybody()) == after
        assert await shown(address, anybody()) == after
    assert caplog.text.count("has a renewed certificate") == 1


@both
async def test_unusable_new_files_leave_the_old_ones(
    port: Port, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    used, new = folders
    before = der(used / "coordinator.pem")
    async with port(tls_in(used)) as address:
        renew(used, new, "coordinator.pem")  # its key is the old one
        for _ in range(2):
            assert await shown(address, anybody()) == before
        assert caplog.text.count("keeps its previous certificate: tls_key") == 1
        (used / "coordinator.key").unlink()
        assert await shown(address, anybody()) == before
        renew(used, new, "coordinator.key")
        assert await shown(address, anybody()) == der(new / "coordinator.pem")


@both
async def test_a_renewed_authority_decides_on_clients(port: Port, folders: tuple[Path, Path]) -> None:
    used, new = folders
    async with port(tls_in(used, ca=True)) as address:
        await shown(address, holder(used))
        renewed = ("coordinator.pem", "coordinator.key", "ca.pem")
        renew(used, new, *renewed)
        await shown(address, holder(new))
        for stranger in (holder(used), anybody()):
            with pytest.raises(OSError, match=r"(?i)alert|refused|reset|eof|certificate"):
                await shown(address, stranger)


def test_files_are_read_only_when_they_change(folders: tuple[Path, Path]) -> None:
    used, new = folders
    made: list[Tls] = []

    def make(tls: Tls) -> int:
        made.append(tls)
        return len(made)

    renewed = Renewed(tls_in(used), make, "a port")
    assert renewed.changed() is None
    assert renewed.present == len(made) == 1
    renew(used, new, "coordinator.pem")
    assert renewed.changed() == 2
    assert renewed.changed() is None
    assert renewed.present == 2


def test_the_first_files_must_be_usable(tmp_path: Path) -> None:
    def refuse(_: Tls) -> Any:
        raise InvalidArgumentError("tls_key", "cannot be read")

    with pytest.raises(InvalidArgumentError):
        Renewed(tls_in(tmp_path), refuse, "a port")
