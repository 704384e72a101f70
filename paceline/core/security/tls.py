"""TLS settings of one end of a connection: names of PEM files, read when the connection is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from paceline.core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Who this end is, and whose word it takes for who the other end is.

    For a client all fields may be empty: it then trusts the system's certificate authorities and shows no
    certificate. A server has at least `certificate` and `key`.
    """

    certificate: str = ""
    """This end's certificate, followed by those between it and the authority's."""
    key: str = ""
    """The certificate's private key, unencrypted."""
    ca: str = ""
    """The authority that the other end's certificate must come from. A server that has one demands a
    certificate of its clients (mTLS); a client without one takes the system's."""
    server_name: str = ""
    """The name that the server's certificate must have (clients only); empty takes the address's host."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming `tls_certificate` or `tls_key`."""
        if self.certificate and not self.key:
            raise InvalidArgumentError("tls_key", "is required with tls_certificate")
        if self.key and not self.certificate:
            raise InvalidArgumentError("tls_certificate", "is required with tls_key")

    @classmethod
    def of(cls, prefix: str, certificate: str, key: str, ca: str) -> Self | None:
        """A server's settings from a configuration's fields `{prefix}_certificate`, …; None if all are empty.

        Raises InvalidArgumentError naming the field.
        """
        if not (certificate or key or ca):
            return None
        if not (certificate or key):
            raise InvalidArgumentError(f"{prefix}_certificate", f"is required with {prefix}_ca")
        try:
            return cls(certificate=certificate, key=key, ca=ca)
        except InvalidArgumentError as error:
            name, text = (part.replace("tls_", f"{prefix}_") for part in (error.field, error.description))
            raise InvalidArgumentError(name, text) from None
