"""gRPC credentials and channels from TLS settings."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from paceline.core.errors import InvalidArgumentError
from paceline.core.security.tls import Tls
from paceline.core.system.small_files import read_bytes
from paceline.rpc.security.certificate_keys import unusable_kind
from paceline.rpc.security.renewal import Renewed

Options = Sequence[tuple[str, Any]]


def check_files(tls: Tls, prefix: str = "tls") -> None:
    """Raises InvalidArgumentError naming `{prefix}_certificate`, `_key` or `_ca` for unusable files.

    gRPC would report nothing, and every handshake would fail.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    contents = {
        name: read_bytes(f"{prefix}_{name}", file)
        for name in ("certificate", "key", "ca")
        if (file := getattr(tls, name))
    }
    if tls.certificate:
        try:
            # An empty password, so that an encrypted key fails instead of prompting.
            context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
        except (ssl.SSLError, ValueError):
            message = f"is not the unencrypted PEM key of {prefix}_certificate, or the latter is not PEM"
            raise InvalidArgumentError(f"{prefix}_key", message) from None
        except OSError as error:  # a file was removed after it was read
            files = f"{tls.certificate} or {tls.key}"
            raise _unreadable(files, f"{prefix}_certificate", error) from None
        if (kind := unusable_kind(contents["certificate"])) is not None:
            message = f"has a key ({kind}) that gRPC does not support; use RSA, P-256 or P-384"
            raise InvalidArgumentError(f"{prefix}_certificate", message)
    if tls.ca:
        try:
            context.load_verify_locations(tls.ca)
        except ssl.SSLError:
            raise InvalidArgumentError(f"{prefix}_ca", "contains no PEM certificate") from None
        except OSError as error:
            raise _unreadable(tls.ca, f"{prefix}_ca", error) from None


def _unreadable(file: str, name: str, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(name, f"{file} cannot be read: {error.strerror}")


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Server credentials; with an authority, client certificates are required. Raises InvalidArgumentError.

    Each new connection uses the current files.
    """
    renewed = Renewed(tls, _server_configuration, "the gRPC port")
    fetch: Any = renewed.changed  # may return None, contrary to gRPC's annotation
    return grpc.dynamic_ssl_server_credentials(
        renewed.present, fetch, require_client_authentication=bool(tls.ca)
    )


def _server_configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    check_files(tls)
    pair = (read_bytes("tls_key", tls.key), read_bytes("tls_certificate", tls.certificate))
    ca = read_bytes("tls_ca", tls.ca) if tls.ca else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)


def channel_credentials(tls: Tls, prefix: str = "tls") -> grpc.ChannelCredentials:
    """Client credentials. Raises InvalidArgumentError as `check_files`."""
    check_files(tls, prefix)
    key, certificate, ca = (
        read_bytes(f"{prefix}_{name}", file) if file else None
        for file, name in ((tls.key, "key"), (tls.certificate, "certificate"), (tls.ca, "ca"))
    )
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _options(address: str, options: Options, tls: Tls | None) -> Options:
    """Add common options. For loopback addresses, the environment's HTTP proxy is disabled, which gRPC would
    otherwise use."""
    more: list[tuple[str, Any]] = []
    if is_loopback(address.rpartition(":")[0]):
        more.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        more.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*options, *more]


def open_channel(address: str, options: Options, tls: Tls | None) -> grpc.Channel:
    """A synchronous channel; `tls` None is plain text. Raises InvalidArgumentError naming a file."""
    options = _options(address, options, tls)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def open_aio_channel(
    address: str, options: Options, tls: Tls | None, prefix: str = "tls"
) -> grpc.aio.Channel:
    """An asyncio channel; `tls` None is plain text. Raises InvalidArgumentError naming a file's setting,
    which begins with `prefix`."""
    options = _options(address, options, tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls, prefix), options=options)


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
