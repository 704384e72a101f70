"""Connection options of client commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.cli.options import option
from paceline.client import AsyncClient
from paceline.client.reaching import DEFAULT_PORT
from paceline.client.resuming import DEFAULT_RESUME_SECONDS
from paceline.core.security.tls import Tls

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
Address = Annotated[
    str,
    option(
        "address",
        "host:port of the coordinator; a host alone means port 50151. Several are separated by commas, or "
        "found by a name: dns:HOST:PORT.",
    ),
]
"""Addresses of the coordinators; the default is that of `paceline serve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """TLS of one connection. Any setting enables TLS."""

    tls: bool = False
    """Use TLS; trusts the system's authorities unless --tls-ca is given."""
    tls_ca: str = ""
    """PEM file with the certificate authority of the server."""
    tls_certificate: str = ""
    """PEM file with the certificate to present."""
    tls_key: str = ""
    """PEM file with that certificate's private key."""
    tls_server_name: str = ""
    """Name in the server's certificate; the default is the address's host."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the option."""
        _ = self.settings

    @property
    def settings(self) -> Tls | None:
        """TLS settings for the SDK; None means plain text."""
        if not (self.tls or self.tls_ca or self.tls_certificate or self.tls_key or self.tls_server_name):
            return None
        return Tls(
            ca=self.tls_ca,
            certificate=self.tls_certificate,
            key=self.tls_key,
            server_name=self.tls_server_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection(Transport):
    """TLS and the API key of one connection to a coordinator."""

    api_key: str | None = None
    """The API key. Prefer the environment variable: other users of this machine can see arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConnection(Connection):
    """Connection of a command that reads streams."""

    resume_seconds: float = DEFAULT_RESUME_SECONDS
    """Seconds without a server since the last chunk during which a broken stream is resumed; 0 disables
    resuming."""

    def client(self, address: str) -> AsyncClient:
        """A client of the coordinators at `address`. Raises InvalidArgumentError naming it."""
        return AsyncClient(
            address, tls=self.settings, api_key=self.api_key, resume_seconds=self.resume_seconds
        )
