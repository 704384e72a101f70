"""What both clients ask of gRPC: channel options, and errors of our own tree."""

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
    """The caller closed the client: nobody is there to go on for."""


class CallCutError(CancelledError):
    """A call ended with CANCELLED without a word of the server's: its gRPC cuts calls so while it stops, and
    ours does where we cancel one ourselves."""


def cut_by(error: PacelineError, *, closed: bool) -> PacelineError:
    """What the caller is told of a call that was cut: one that did not close it did not cancel it."""
    if isinstance(error, CallCutError) and not closed:
        return UnavailableError("the server ended the call")
    return error


_NEVER_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""How gRPC's text begins where no connection came about."""


@dataclass(slots=True)
class Contact:
    """Whether a client has ever reached its server. Any of its threads may say so."""

    made: bool = False

    def learn(self, error: PacelineError) -> None:
        """Only a server that was reached can break a call."""
        self.made = self.made or not error.message.startswith(_NEVER_CONNECTED)


KEEPALIVE_MILLISECONDS = 30_000
"""A peer that is silent for this long is pinged, while a call is open."""
KEEPALIVE_TIMEOUT_MILLISECONDS = 10_000
"""A peer that does not answer the ping within this long is lost."""
RECONNECT_MILLISECONDS = 2_000
"""At most this long after a server is back, calls reach it again."""


CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MILLISECONDS),
)
"""Bounds and liveness of a client's channel."""


CLOSED = "the call was closed while it ran"


def checked_tls(tls: Tls | None) -> Tls | None:
    """Raises InvalidArgumentError naming `tls`, or the file that cannot be used."""
    if tls is not None:
        if not isinstance(tls, Tls):
            raise InvalidArgumentError("tls", f"must be Tls, got {type(tls).__name__}")
        check_files(tls)
    return tls


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call. Raises InvalidArgumentError for a key that no header can carry."""
    if api_key is None:
        return ()
    if not isinstance(api_key, str) or not api_key or not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgumentError("api_key", "must be printable ASCII text")
    return (("authorization", f"Bearer {api_key}"),)


def readable(message: _Message | None) -> _Message:
    """What grpc.aio read: None stands for bytes that are no message.

    Raises InternalError for these, as the synchronous API does.
    """
    if message is None:
        raise InternalError("the server sent bytes that are no message of this method")
    return message


@contextmanager
def translated() -> Iterator[None]:
    """Raise what gRPC raises inside as an error of `paceline.core.errors`.

    grpc.aio raises asyncio.CancelledError also when it was the call or its channel, not the caller's
    task, that was cancelled. That is an ordinary error here; a cancelled task stays cancelled.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _told(error) from error
    except (ValueError, grpc.aio.UsageError) as error:
        # What a closed channel raises, of the synchronous and of the asynchronous API.
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
