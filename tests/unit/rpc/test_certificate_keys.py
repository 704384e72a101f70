"""Certificates that gRPC's TLS cannot use are refused by name, before every handshake fails."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.refusals import refused

from paceline.core.security.tls import Tls
from paceline.rpc.security.certificate_keys import unusable_kind
from paceline.rpc.security.credentials import check_files, open_aio_channel
from tests.unit.rpc.serving import HANG, NOT_SERVING, serving

GOOD = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}
BAD = {
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
    "unknown kind": lambda: ec.generate_private_key(ec.SECP256K1()),
}


def certificate_of(key: Any) -> bytes:
    """Its own authority, for localhost."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey) else hashes.SHA256()
    return builder.sign(key, digest).public_bytes(serialization.Encoding.PEM)


def private_part(key: Any) -> bytes:
    private: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private


def files(folder: Path, key: Any) -> Tls:
    certificate, private = folder / "it.pem", folder / "it.key"
    certificate.write_bytes(certificate_of(key))
    private.write_bytes(private_part(key))
    return Tls(certificate=str(certificate), key=str(private))


@pytest.mark.parametrize("kind", BAD)
def test_a_key_unsupported_by_grpc_is_named(kind: str, tmp_path: Path) -> None:
    """Otherwise every handshake would fail."""
    with refused("worker_tls_certificate") as caught:
        check_files(files(tmp_path, BAD[kind]()), "worker_tls")
    assert f"has a key ({kind}) that gRPC does not support" in str(caught.value)


@pytest.mark.parametrize("kind", GOOD)
async def test_an_accepted_key_works(kind: str, tmp_path: Path) -> None:
    tls = files(tmp_path, GOOD[kind]())
    async with serving(tls=tls) as server:
        address = server.address.replace("127.0.0.1", "localhost")
        async with open_aio_channel(address, (), Tls(ca=tls.certificate)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    assert answer.status == NOT_SERVING


@pytest.mark.parametrize("kind", ["P-521", "Ed25519"])
async def test_a_refused_key_does_not_work(kind: str) -> None:
    """Between two plain gRPC processes: once gRPC supports it, it should be accepted."""
    key = BAD[kind]()
    certificate = certificate_of(key)
    credentials = grpc.ssl_server_credentials([(private_part(key), certificate)])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    async with grpc.aio.secure_channel(
        f"localhost:{port}", grpc.ssl_channel_credentials(certificate)
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/a/b")(b"", timeout=HANG)
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_only_a_files_first_certificate_is_checked() -> None:
    good, bad = certificate_of(GOOD["P-256"]()), certificate_of(BAD["Ed25519"]())
    assert unusable_kind(b"# a chain\n" + good + bad) is None
    assert unusable_kind(bad + good) == "Ed25519"


def test_invalid_certificates_are_not_judged() -> None:
    whole = certificate_of(BAD["Ed25519"]())
    for pem in (b"", b"text", whole[:-30], whole.replace(b"M", b"!", 9)):
        assert unusable_kind(pem) is None
    lines = whole.splitlines(keepends=True)
    for cut in range(1, len(lines) - 1):
        unusable_kind(b"".join(lines[:cut] + lines[-1:]))
