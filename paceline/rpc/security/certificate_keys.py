"""Checks for certificate keys that gRPC's TLS does not support although OpenSSL can read them.

gRPC reports nothing, or only that it cannot listen, and every handshake fails.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

_EC: Final = "2a8648ce3d0201"
USABLE: Final = frozenset({"2a864886f70d010101", f"{_EC}/2a8648ce3d030107", f"{_EC}/2b81040022"})
"""RSA, P-256 and P-384, by the bytes of their object identifiers (RFC 3279, RFC 5480), in hexadecimal."""
_NAMES: Final[Mapping[str, str]] = {"2b6570": "Ed25519", "2b6571": "Ed448", f"{_EC}/2b81040023": "P-521"}

_FIRST: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_OBJECT_IDENTIFIER, _VERSION = 0x06, 0xA0
_UTC_TIME: Final = 0x17


def unusable_kind(pem: bytes) -> str | None:
    """The kind of the first certificate's key if gRPC cannot use it, else None. Also None for unreadable
    files, which OpenSSL reports."""
    found = _FIRST.search(pem)
    if found is None:
        return None
    try:
        kind = _kind(ssl.PEM_cert_to_DER_cert(found[0].decode("ascii")))
    except (ValueError, IndexError):
        return None
    return None if kind in USABLE else _NAMES.get(kind, "unknown kind")


def ends(pem: bytes) -> list[datetime]:
    """Expiry of each readable certificate in a file."""
    found = []
    for block in _FIRST.findall(pem):
        try:
            certificate = ssl.PEM_cert_to_DER_cert(block.decode("ascii"))
            _, (tag, text) = _values(_fields(certificate)[3])
            found.append(_moment(tag, text.decode("ascii")))
        except (ValueError, IndexError):
            continue
    return found


def _moment(tag: int, text: str) -> datetime:
    """Parse a time. Two-digit years from 50 on are in the 20th century. Raises ValueError."""
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _fields(certificate: bytes) -> list[bytes]:
    """Serial number, signature, issuer, validity, subject and key (RFC 5280, 4.1).

    Raises ValueError, IndexError.
    """
    ((_, whole),) = _values(certificate)
    (_, signed), *_ = _values(whole)
    return [value for tag, value in _values(signed) if tag != _VERSION]


def _kind(certificate: bytes) -> str:
    """The key's algorithm and, for an elliptic curve, the curve. Raises ValueError, IndexError."""
    (_, algorithm), *_ = _values(_fields(certificate)[5])
    return "/".join(value.hex() for tag, value in _values(algorithm) if tag == _OBJECT_IDENTIFIER)


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each DER value in the content of another."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:  # long form: the low bits give the number of length bytes
            at, length = at + length - 0x80, int.from_bytes(der[at : at + length - 0x80], "big")
        yield tag, der[at : at + length]
        at += length
