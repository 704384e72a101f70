"""An interceptor around every handler: authorisation, and error messages under Paceline's control.

Without it, grpc.aio answers undecodable bytes and exceptions of handlers with UNKNOWN and the exception's
text.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, NotFoundError, PacelineError
from paceline.rpc.codec.status import abort
from paceline.rpc.security.auth import Check, Context
from paceline.rpc.server.reading import Readings, UnfinishedMessages

log = logging.getLogger(__name__)

Counted = Callable[[], AbstractContextManager[None]]

_UNREADABLE: Final = object()
"""Marks undecodable bytes between the deserialiser and the handler."""


class ShieldInterceptor(grpc.aio.ServerInterceptor):
    """Runs `check` before every method, including unknown ones, and converts exceptions to statuses.

    A method with a single request is served as a request stream, which is the same on the wire, so that its
    message is read after the check and within the bounds of `readings`.
    """

    def __init__(
        self,
        check: Check | None = None,
        counted: Counted = contextlib.nullcontext,
        readings: Readings | None = None,
    ) -> None:
        """`counted` wraps every handler from the arrival of its message to its end."""
        self._check = check or (lambda _context, _method: None)
        self._counted = counted
        self._readings = readings or Readings(limits.MAX_MESSAGE_BYTES)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler behind the check."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        known = handler or refusal(NotFoundError("no such method"), unknown=True)
        return _around(known, self._check, method, self._counted, self._readings.of(method))


def refusal(error: PacelineError, *, unknown: bool = False) -> Any:
    """A handler that ends any call with `error` without reading its messages.

    An `unknown` method ends with UNIMPLEMENTED.
    """

    async def refuse(_requests: Any, context: Context) -> None:
        if unknown:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, error.message)
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _around(handler: Any, check: Check, method: str, counted: Counted, reading: UnfinishedMessages) -> Any:
    """Wrap a handler as one with a request stream and the same responses."""
    receives, sends = handler.request_streaming, handler.response_streaming
    end = "stream" if sends else "unary"
    behavior = getattr(handler, f"{'stream' if receives else 'unary'}_{end}")
    read = _tolerant(handler.request_deserializer)

    async def given(requests: Any, context: Context) -> Any:
        check(context, method)
        if receives:
            return _each_readable(requests)
        data = await reading.one(context)
        check(context, method)  # again, because the server may be stopping by now
        return _readable(data if read is None else read(data))

    async def single(requests: Any, context: Context) -> Any:
        with contextlib.ExitStack() as running:
            try:
                request = await given(requests, context)
                running.enter_context(counted())
                return await behavior(request, context)
            except Exception as error:
                await _end(context, error)

    async def several(requests: Any, context: Context) -> AsyncIterator[Any]:
        with contextlib.ExitStack() as running:
            try:
                request = await given(requests, context)
                running.enter_context(counted())
                # A cancelled call must end its handler at once, not at garbage collection.
                async with contextlib.aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await _end(context, error)

    # A streaming handler may also be a coroutine that writes to the context.
    whole: Any = several if inspect.isasyncgenfunction(behavior) else single
    make = getattr(grpc, f"stream_{end}_rpc_method_handler")
    return make(whole, read if receives else None, handler.response_serializer)


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


def _readable(request: Any) -> Any:
    if request is _UNREADABLE:
        raise InvalidArgumentError("request", "is not a message of this method")
    return request


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


async def _end(context: Context, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the call is already aborted
    if isinstance(error, grpc.aio.InternalError):
        return  # gRPC could not send because the caller is gone
    if not isinstance(error, PacelineError):
        log.error("a call failed", exc_info=error)
    await abort(context, error)
