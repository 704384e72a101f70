"""Where a server is, as its users write it, and what is likely wrong where it cannot be reached. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InvalidArgumentError, PacelineError, UnavailableError

DEFAULT_PORT: Final = 50151
"""Of a coordinator that `paceline serve` starts."""

_OF_GRPC: Final = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")
"""Names in gRPC's own form, which are left to it."""


def checked_address(address: str) -> str:
    """The address with a port. Raises InvalidArgumentError naming `address`."""
    if not isinstance(address, str) or not address.strip():
        raise InvalidArgumentError("address", "must be host:port")
    if _OF_GRPC.match(address):
        return address
    if "://" in address:
        raise InvalidArgumentError(
            "address", f"{address} is a URL; gRPC's address is host:port, such as 127.0.0.1:{DEFAULT_PORT}"
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
    if not host or re.search(r"[\s/]", host) or not (port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidArgumentError("address", f"must be host:port, got {address!r}")
    return f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Reach:
    """An address, and how it is talked to."""

    address: str
    secure: bool
    """With TLS."""

    def told(self, error: PacelineError) -> PacelineError:
        """The same error, in our words where gRPC says that it reached no server."""
        if type(error) is not UnavailableError:
            return error
        for pattern, with_tls, meaning in _MEANINGS:
            if with_tls in (None, self.secure) and re.search(pattern, error.message):
                return UnavailableError(meaning.format(address=self.address), error.last_index)
        return error


_MEANINGS: Final = (
    (
        "Connection refused",
        None,
        "nobody listens at {address} (Connection refused): is `paceline serve` running there, and has it "
        "said that it listens?",
    ),
    ("errors resolving|DNS resolution failed", None, "the host of {address} is not known here"),
    (
        "WRONG_VERSION_NUMBER",
        True,
        "{address} does not speak TLS: leave tls_ca and the like out, and the variables PACELINE_TLS_…",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        True,
        "the certificate of {address} is of no authority that is trusted here: tls_ca names its file",
    ),
    (
        "Hostname Verification",
        True,
        "the certificate of {address} is not for that host: tls_server_name says whom it is for",
    ),
    (
        "all addresses.*(Socket closed|Connection reset|handshake)",
        True,
        "{address} broke the TLS handshake off: it may demand a certificate of its clients "
        "(tls_certificate, tls_key)",
    ),
    (
        "Failed parsing HTTP/2|http1",
        None,
        "{address} answers HTTP/1 and not gRPC: that may be the port of OpenAI's API, and gRPC's is another "
        f"one, {DEFAULT_PORT} if --port chose none",
    ),
    (
        "all addresses.*(Socket closed|Connection reset)",
        False,
        "{address} does not take plain text: it may have TLS, and tls_ca names its authority's file",
    ),
    (
        "timed out|No route to host|Network is unreachable",
        None,
        "{address} cannot be reached over the network",
    ),
)
"""What gRPC's text has in it, whether the channel had TLS (None: either), and what that means."""
