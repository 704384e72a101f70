"""TLS settings of one end of a connection: PEM files, read when the connection is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from paceline.core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """This end's identity and the authority it trusts.

    A client may leave all fields empty: it then trusts the system's certificate authorities and presents no
    certificate. A server has at least `certificate` and `key`.
    """

    certificate: str = ""
    """This end's certificate, followed by intermediate certificates."""
    key: str = ""
    """The certificate's private key, unencrypted."""
    ca: str = ""
    """The authority of the other end's certificate. A server with an authority requires client certificates
    (mTLS); a client without one trusts the system's authorities."""
    server_name: str = ""
    """The name in the server's certificate (clients only); empty takes the address's host."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming `tls_certificate` or `tls_key`."""
        if self.certificate and not self.key:
            raise InvalidArgumentError("tls_key", "is required with tls_certificate")
        if self.key and not self.certificate:
            raise InvalidArgumentError("tls_certificate", "is required with tls_key")

    @classmethod
    def of(cls, prefix: str, certificate: str, key: str, ca: str) -> Self | None:
        """A server's settings from the configuration fields `{prefix}_certificate`, …; None if all are empty.

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
