"""Server addresses as users write them, and likely causes of failed connections. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InvalidArgumentError, PacelineError, UnavailableError

DEFAULT_PORT: Final = 50151
"""Default gRPC port of `paceline serve`."""

_OF_GRPC: Final = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")
"""Addresses in gRPC's own form, passed on unchanged."""
_LIST_OF_GRPC: Final = re.compile(r"ipv[46]:")
"""Of these, the ones that may contain commas."""
_OF_NAME: Final = re.compile(r"dns:(?!/)")
"""Beginning of a host name all of whose addresses are meant."""

Addresses = str | Sequence[str]
"""One address, several separated by commas, or a sequence of them. Each is host:port, a host alone, an
address in gRPC's own form, or dns:host:port, which stands for every address of that name."""


def checked_addresses(address: Addresses) -> tuple[str, ...]:
    """Each address with a port; those that begin with `dns:` are names.

    Raises InvalidArgumentError naming `address` for an empty list, and for one that is malformed or doubled.
    """
    if isinstance(address, str):
        written: Sequence[str] = [address] if _LIST_OF_GRPC.match(address) else address.split(",")
    elif isinstance(address, Sequence) and not isinstance(address, bytes | bytearray | memoryview):
        written = address
    else:
        raise InvalidArgumentError("address", f"must be host:port or a list, got {type(address).__name__}")
    if not written:
        raise InvalidArgumentError("address", "must have at least one host:port, got an empty list")
    checked: list[str] = []
    for each in written:
        one = _checked(each.strip() if isinstance(each, str) else each)
        if one in checked:
            raise InvalidArgumentError("address", f"has {one} twice")
        checked.append(one)
    return tuple(checked)


def name_of(address: str) -> tuple[str, str] | None:
    """Host and port of a checked address that is a name; None for any other."""
    if not _OF_NAME.match(address):
        return None
    host, _, port = address.removeprefix("dns:").rpartition(":")
    return host, port


def _checked(address: str) -> str:
    if not isinstance(address, str) or not _OF_NAME.match(address):
        return checked_address(address)
    place = address.removeprefix("dns:")
    if not place or _OF_GRPC.match(place):
        raise InvalidArgumentError("address", f"must be dns:host:port, got {address!r}")
    return f"dns:{checked_address(place)}"


def checked_address(address: str) -> str:
    """The address with a port. Raises InvalidArgumentError naming `address`."""
    if not isinstance(address, str) or not address.strip():
        raise InvalidArgumentError("address", "must be host:port")
    if _OF_GRPC.match(address):
        return address
    if "://" in address:
        raise InvalidArgumentError(
            "address", f"{address} is a URL; use host:port, such as 127.0.0.1:{DEFAULT_PORT}"
        )
    if address.startswith("["):
        host, bracket, port = address.partition("]")
        host = host + bracket if bracket else ""
        port = port.removeprefix(":") if port else str(DEFAULT_PORT)
    elif address.count(":") > 1:
        host, port = f"[{address}]", str(DEFAULT_PORT)
    else:
        host, colon, port = address.partition(":")
        port = port if colon else str(DEFAULT_PORT)
    if not host or re.search(r"[\s/,]", host) or not (port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidArgumentError("address", f"must be host:port, got {address!r}")
    return f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Reach:
    """An address and whether it uses TLS."""

    address: str
    secure: bool
    tried: int = 1
    """Number of addresses that were tried, this one last."""

    def told(self, error: PacelineError) -> PacelineError:
        """The error, with a clear message if gRPC could not reach a server."""
        if type(error) is not UnavailableError:
            return error
        for pattern, with_tls, meaning in _MEANINGS:
            if with_tls in (None, self.secure) and re.search(pattern, error.message):
                last = f" (the last of {self.tried} addresses tried)" if self.tried > 1 else ""
                return UnavailableError(meaning.format(address=self.address) + last, error.last_index)
        return error


_MEANINGS: Final = (
    (
        "Connection refused",
        None,
        "no server is listening at {address} (Connection refused): is `paceline serve` running and ready?",
    ),
    ("errors resolving|DNS resolution failed", None, "the host name of {address} cannot be resolved"),
    (
        "WRONG_VERSION_NUMBER",
        True,
        "{address} does not use TLS: omit tls_ca and the other TLS settings and variables (PACELINE_TLS_…)",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        True,
        "the certificate of {address} is from an untrusted authority: set tls_ca to the authority's file",
    ),
    (
        "Hostname Verification",
        True,
        "the certificate of {address} is for another host name: set tls_server_name to that name",
    ),
    (
        "all addresses.*(Socket closed|Connection reset|handshake)",
        True,
        "{address} aborted the TLS handshake: it may require a client certificate (tls_certificate, tls_key)",
    ),
    (
        "Failed parsing HTTP/2|http1",
        None,
        "{address} answers HTTP/1, not gRPC: it may be the port of the OpenAI-compatible API; gRPC has its "
        f"own port, {DEFAULT_PORT} unless --port is set",
    ),
    (
        "all addresses.*(Socket closed|Connection reset)",
        False,
        "{address} refuses plain text: it may require TLS; set tls_ca to its authority's file",
    ),
    (
        "timed out|No route to host|Network is unreachable",
        None,
        "{address} cannot be reached over the network",
    ),
)
"""A pattern in gRPC's message, whether the channel used TLS (None: either), and the explanation."""
