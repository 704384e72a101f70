"""gRPC channel options and error translation of the synchronous and the asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from paceline.core import limits
from paceline.core.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    PacelineError,
    UnavailableError,
)
from paceline.core.security.tls import Tls
from paceline.rpc.codec.status import DETAILS_KEY, from_rpc_error
from paceline.rpc.security.credentials import check_files

_Message = TypeVar("_Message")


class ClientClosedError(UnavailableError):
    """The caller closed the client."""


class CallCutError(CancelledError):
    """A call ended with CANCELLED and without Paceline's error details: the server's gRPC is stopping, or
    this client cancelled the call."""


def cut_by(error: PacelineError, *, closed: bool) -> PacelineError:
    """Convert CallCutError to UnavailableError, unless this client closed the call itself (`closed`)."""
    if isinstance(error, CallCutError) and not closed:
        return UnavailableError("the server ended the call")
    return error


_NEVER_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""Prefixes of gRPC's error messages for calls that never had a connection."""


@dataclass(slots=True)
class Contact:
    """Whether a client has ever reached its server. Any thread may set it."""

    made: bool = False

    def learn(self, error: PacelineError) -> None:
        """Record contact if the error came from an established connection."""
        self.made = self.made or not error.message.startswith(_NEVER_CONNECTED)


KEEPALIVE_MILLISECONDS = 30_000
"""During a call, the peer is pinged after this much silence."""
KEEPALIVE_TIMEOUT_MILLISECONDS = 10_000
"""If a ping is not answered within this time, the connection counts as lost."""
RECONNECT_MILLISECONDS = 2_000
"""Maximum backoff: calls reach a restarted server within this time."""


CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MILLISECONDS),
)
"""Message bounds, keepalive and reconnection of a client's channel."""


CLOSED = "the call was closed while it ran"


def checked_tls(tls: Tls | None) -> Tls | None:
    """Raises InvalidArgumentError naming `tls` or an unusable file."""
    if tls is not None:
        if not isinstance(tls, Tls):
            raise InvalidArgumentError("tls", f"must be Tls, got {type(tls).__name__}")
        check_files(tls)
    return tls


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call. Raises InvalidArgumentError for a key that a header cannot carry."""
    if api_key is None:
        return ()
    if not isinstance(api_key, str) or not api_key or not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgumentError("api_key", "must be printable ASCII text")
    return (("authorization", f"Bearer {api_key}"),)


def readable(message: _Message | None) -> _Message:
    """Return a message read by grpc.aio.

    Raises InternalError if it is None, which is what grpc.aio returns for undecodable bytes. The synchronous
    API raises the same error.
    """
    if message is None:
        raise InternalError("the server sent bytes that are not a message of this method")
    return message


@contextmanager
def translated() -> Iterator[None]:
    """Translate gRPC errors raised inside to errors of `paceline.core.errors`.

    grpc.aio raises asyncio.CancelledError if the call, the channel or the caller's task is cancelled. The
    error is translated for a cancelled call or channel, and raised unchanged for a cancelled task.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _told(error) from error
    except (ValueError, grpc.aio.UsageError) as error:
        # Raised for a closed channel: ValueError by the synchronous API, UsageError by the asynchronous one.
        raise ClientClosedError("this client is closed") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledError(CLOSED) from None


def _told(error: grpc.RpcError) -> PacelineError:
    told = from_rpc_error(error)
    metadata: Any = error.trailing_metadata() or ()
    if isinstance(told, CancelledError) and DETAILS_KEY not in dict(metadata):
        return CallCutError(told.message)
    return told
