"""TLS settings as what gRPC wants: the files read, checked, and made into credentials and channels."""

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
    """Raises InvalidArgumentError naming `{prefix}_certificate`, `_key` or `_ca` for what cannot be used.

    gRPC itself would say nothing, and let every handshake fail.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    contents = {
        name: read_bytes(f"{prefix}_{name}", file)
        for name in ("certificate", "key", "ca")
        if (file := getattr(tls, name))
    }
    if tls.certificate:
        try:
            # A password is never asked for: an encrypted key is one that cannot be used.
            context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
        except (ssl.SSLError, ValueError):
            message = f"is no unencrypted PEM key of {prefix}_certificate, or that is no PEM certificate"
            raise InvalidArgumentError(f"{prefix}_key", message) from None
        except OSError as error:  # one of them is gone since it was read
            files = f"{tls.certificate} or {tls.key}"
            raise _unreadable(files, f"{prefix}_certificate", error) from None
        if (kind := unusable_kind(contents["certificate"])) is not None:
            message = f"has a key ({kind}) that gRPC cannot use; it takes RSA, P-256 and P-384"
            raise InvalidArgumentError(f"{prefix}_certificate", message)
    if tls.ca:
        try:
            context.load_verify_locations(tls.ca)
        except ssl.SSLError:
            raise InvalidArgumentError(f"{prefix}_ca", "holds no PEM certificate") from None
        except OSError as error:
            raise _unreadable(tls.ca, f"{prefix}_ca", error) from None


def _unreadable(file: str, name: str, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(name, f"{file} cannot be read: {error.strerror}")


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """With an authority every client must show a certificate of it. Raises InvalidArgumentError.

    Each new connection gets what the files hold then.
    """
    renewed = Renewed(tls, _server_configuration, "the gRPC port")
    fetch: Any = renewed.changed  # None is allowed, whatever its type says
    return grpc.dynamic_ssl_server_credentials(
        renewed.present, fetch, require_client_authentication=bool(tls.ca)
    )


def _server_configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    check_files(tls)
    pair = (read_bytes("tls_key", tls.key), read_bytes("tls_certificate", tls.certificate))
    ca = read_bytes("tls_ca", tls.ca) if tls.ca else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)


def channel_credentials(tls: Tls, prefix: str = "tls") -> grpc.ChannelCredentials:
    """Raises InvalidArgumentError naming a file as `check_files` does."""
    check_files(tls, prefix)
    key, certificate, ca = (
        read_bytes(f"{prefix}_{name}", file) if file else None
        for file, name in ((tls.key, "key"), (tls.certificate, "certificate"), (tls.ca, "ca"))
    )
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _options(address: str, options: Options, tls: Tls | None) -> Options:
    """With what every channel of ours has. This machine is never reached through an HTTP proxy, which gRPC
    would ask wherever the environment names one."""
    more: list[tuple[str, Any]] = []
    if is_loopback(address.rpartition(":")[0]):
        more.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        more.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*options, *more]


def open_channel(address: str, options: Options, tls: Tls | None) -> grpc.Channel:
    """A channel for threads; None is plain text. Raises InvalidArgumentError naming a file."""
    options = _options(address, options, tls)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def open_aio_channel(
    address: str, options: Options, tls: Tls | None, prefix: str = "tls"
) -> grpc.aio.Channel:
    """A channel for asyncio; None is plain text. Raises InvalidArgumentError naming a file by its setting,
    which begins with `prefix`."""
    options = _options(address, options, tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls, prefix), options=options)


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
