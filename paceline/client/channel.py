"""gRPC channel options and error translation of the synchronous and the asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from paceline.core import limits
from paceline.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    PacelineError,
    UnavailableError,
)
from paceline.core.security.tls import Tls
from paceline.rpc.codec.status import from_rpc_error, is_ours
from paceline.rpc.security.credentials import check_files

_Message = TypeVar("_Message")


class ClientClosedError(UnavailableError):
    """The caller closed the client."""


class CallCutError(CancelledError):
    """A call ended with CANCELLED and without Paceline's error details: the server's gRPC is stopping, a
    proxy lost it, or this client cancelled the call."""


class DeadlineCutError(DeadlineExceededError):
    """A call ended with DEADLINE_EXCEEDED and without Paceline's error details: the call's own deadline has
    passed, or a proxy's."""


def cut_by(error: PacelineError, *, closed: bool) -> PacelineError:
    """Convert CallCutError to UnavailableError, unless this client closed the call itself (`closed`)."""
    if isinstance(error, CallCutError) and not closed:
        return UnavailableError("the server ended the call")
    return error


_NEVER_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""Prefixes of gRPC's error messages for calls that never had a connection."""


def never_connected(error: PacelineError) -> bool:
    """True if the call that ended with `error` reached no server."""
    return error.message.startswith(_NEVER_CONNECTED)


@dataclass(slots=True)
class Contact:
    """Whether a client has ever reached one of its servers. Any thread may set it."""

    made: bool = False

    def learn(self, error: PacelineError) -> None:
        """Record contact if the error came from an established connection."""
        self.made = self.made or not never_connected(error)


KEEPALIVE_MILLISECONDS = 30_000
"""During a call, the peer is pinged after this much silence."""
KEEPALIVE_TIMEOUT_MILLISECONDS = 10_000
"""If a ping is not answered within this time, the connection counts as lost."""
RECONNECT_MILLISECONDS = 2_000
"""Maximum backoff: calls reach a restarted server within this time."""
CONNECT_MILLISECONDS = 5_000
"""A connection that takes longer is given up, so that a call can go to another server."""


CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MILLISECONDS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MILLISECONDS),
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


_ANSWERS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Codes that say something of the caller or the message, whoever sends them: another server would not serve
the call either."""
_UNDECODABLE = "Exception deserializing response!"
"""gRPC's message for an INTERNAL of its own: the bytes arrived and are no message."""


def _told(error: grpc.RpcError) -> PacelineError:
    told = from_rpc_error(error)
    code = error.code()
    if is_ours(error) or code in _ANSWERS or error.details() == _UNDECODABLE:
        return told
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return told
        case grpc.StatusCode.CANCELLED:
            return CallCutError(told.message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineCutError(told.message)
    # A proxy that has lost its server answers in its own words, such as INTERNAL.
    return UnavailableError(f"the connection to the server broke ({code.name}: {told.message})")
