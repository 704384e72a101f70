"""Creates a certificate authority and a certificate for each role. Requires `cryptography`.

Existing files are never overwritten. Only the owner can read keys. A certificate contains its role as a DNS
name, in addition to its hosts (`paceline/rpc/security/auth.py`).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
from cryptography.x509.oid import NameOID

from paceline.core.errors import InvalidArgumentError
from paceline.rpc.security.auth import PeerRole

CERTIFICATE_ROLES = tuple(role.value for role in PeerRole)
CA_NAME = "Paceline authority"
CA_DAYS = 3650
HOSTS = ("localhost", "127.0.0.1", "::1")


def _write(path: Path, content: bytes, mode: int) -> None:
    """Create a file; raises FileExistsError if it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _save(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Write NAME.key, then NAME.pem."""
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(folder / f"{name}.key", key.private_bytes(pem, pkcs8, serialization.NoEncryption()), 0o600)
    _write(folder / f"{name}.pem", certificate.public_bytes(pem), 0o644)


def _name_of(subject: str) -> x509.Name:
    """The display name, which has no technical effect."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])


def _builder(subject: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    """The common parts of all certificates. Valid from an hour ago, because clocks differ."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name_of(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """The authority signs certificates; all others sign handshakes."""
    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    rest = dict.fromkeys((*names, "encipher_only", "decipher_only"), False)
    signs = signs_certificates
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **rest)


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Load or create the authority. It cannot certify further authorities."""
    if (folder / "ca.pem").exists() and (folder / "ca.key").exists():
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    made = _builder(CA_NAME, key, CA_DAYS).issuer_name(_name_of(CA_NAME))
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(_usage(signs_certificates=True), critical=True)
    certificate = made.sign(key, hashes.SHA256())
    _save(folder, "ca", key, certificate)
    return key, certificate


def _alternative_name(host: str) -> x509.GeneralName:
    """An IP address if it parses as one, else a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certify(
    ca: tuple[ec.EllipticCurvePrivateKey, x509.Certificate], role: str, hosts: list[str], days: int
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Create a key and its certificate. All roles are TLS clients; all except `client` are also servers."""
    ca_key, ca_certificate = ca
    key = ec.generate_private_key(ec.SECP256R1())
    names = [PeerRole(role).dns_name, *([] if role == "client" else hosts)]
    purposes = [Usage.CLIENT_AUTH] if role == "client" else [Usage.SERVER_AUTH, Usage.CLIENT_AUTH]
    made = _builder(f"Paceline {role}", key, days).issuer_name(ca_certificate.subject)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName([_alternative_name(name) for name in names]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ):
        made = made.add_extension(extension, critical=critical)
    return key, made.sign(ca_key, hashes.SHA256())


def make_certificates(
    folder: Path, roles: Sequence[str] = (), hosts: Sequence[str] = (), name: str = "", days: int = 365
) -> dict[Path, str]:
    """Write the certificates and return the new files with their roles.

    Args:
        folder: receives `ca.pem` and `ca.key` unless they exist, and NAME.pem and NAME.key of each role.
        roles: empty means all.
        hosts: names and addresses of the servers, in addition to `HOSTS`.
        name: file name for a single role; the default is the role.
        days: validity of the certificates.

    Raises InvalidArgumentError naming `role`, `name`, `days` or `folder` without writing anything.
    """
    chosen = list(dict.fromkeys(roles)) or list(CERTIFICATE_ROLES)
    for role in chosen:
        if role not in CERTIFICATE_ROLES:
            raise InvalidArgumentError("role", f"must be one of {', '.join(CERTIFICATE_ROLES)}, got {role}")
    if name and len(chosen) != 1:
        raise InvalidArgumentError("name", "requires exactly one role")
    if name != Path(name).name or name == "ca":
        raise InvalidArgumentError("name", "must be a plain file name other than ca")
    if not 1 <= days <= CA_DAYS:
        raise InvalidArgumentError("days", f"must be between 1 and {CA_DAYS}")
    files = {name or role: role for role in chosen}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = [
        file for each in files for file in (folder / f"{each}.pem", folder / f"{each}.key") if file.exists()
    ]
    if there:
        raise InvalidArgumentError("folder", f"{there[0]} exists")
    if (folder / "ca.pem").exists() != (folder / "ca.key").exists():
        raise InvalidArgumentError("folder", "must contain both ca.pem and ca.key, or neither")
    ca = _authority(folder)
    for each, role in files.items():
        _save(folder, each, *_certify(ca, role, [*HOSTS, *hosts], days))
    return {folder / f"{each}.pem": role for each, role in files.items()}
