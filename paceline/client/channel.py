"""What both clients ask of gRPC: channel options, and errors of our own tree."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from paceline.core import limits
from paceline.core.errors import CancelledError, UnavailableError
from paceline.rpc.status import from_rpc_error


class ClientClosedError(UnavailableError):
    """The caller closed the client: nobody is there to go on for."""


KEEPALIVE_MILLISECONDS = 30_000
"""A peer that is silent for this long is pinged, while a call is open."""
KEEPALIVE_TIMEOUT_MILLISECONDS = 10_000
"""A peer that does not answer the ping within this long is lost."""
RECONNECT_MILLISECONDS = 2_000
"""At most this long after a server is back, calls reach it again."""


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """Bounds and liveness of the channel to `address`; loopback never goes through an HTTP proxy."""
    options = (
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MILLISECONDS),
    )
    return (*options, ("grpc.enable_http_proxy", 0)) if _is_loopback(address) else options


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def translated() -> Iterator[None]:
    """Raise what gRPC raises inside as an error of `paceline.core.errors`.

    grpc.aio raises asyncio.CancelledError also when it was the call or its channel, not the caller's
    task, that was cancelled. That is an ordinary error here; a cancelled task stays cancelled.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except (ValueError, grpc.aio.UsageError) as error:
        # What a closed channel raises, of the synchronous and of the asynchronous API.
        raise ClientClosedError("this client is closed") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledError("the call was closed while it ran") from None
