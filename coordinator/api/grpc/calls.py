"""Counts gRPC calls and logs each one at its end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.auth import principal
from coordinator.telemetry import call_log
from coordinator.telemetry.metrics import Metrics
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.server.error_guard import refusal
from paceline.v1 import admin_pb2, generation_pb2

PACKAGE = "/paceline."
"""Health checks and reflection are not client calls. All unregistered methods get one name with this prefix
(safe_server.py)."""
METHODS = frozenset(
    f"/{service.full_name}/{method.name}"
    for file in (generation_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
UNKNOWN = "unknown"
"""Label of all other methods."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Sequence[tuple[str, str | bytes]]
Observing = Callable[[Context], AbstractContextManager[None]]


class GrpcCallObserver(grpc.aio.ServerInterceptor):
    """Observes every call of Paceline's own services, including those that a later interceptor refuses."""

    def __init__(self, metrics: Metrics, clock: Clock = monotonic) -> None:
        self._metrics = metrics
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Put an observer around the method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(PACKAGE):
            return handler
        # Method names invented by clients must not become metric labels.
        name = method.removeprefix("/") if method in METHODS else UNKNOWN
        metadata: Metadata = handler_call_details.invocation_metadata or ()
        given, refused_field = "", ""
        try:
            given = call_log.given_id(_values(metadata, call_log.REQUEST_ID))
        except InvalidArgumentError as error:
            handler, refused_field = refusal(error), error.field
        observing = partial(self._observing, name, metadata, given, refused_field)
        # The error guard behind this interceptor turns all requests into streams.
        kind = f"stream_{'stream' if handler.response_streaming else 'unary'}"
        behaviour = getattr(handler, kind)
        # A streaming method may also be a coroutine that writes to the context.
        observe = _streaming if inspect.isasyncgenfunction(behaviour) else _single
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        observed: Handler = make(
            observe(observing, behaviour), handler.request_deserializer, handler.response_serializer
        )
        return observed

    @contextlib.contextmanager
    def _observing(
        self, method: str, metadata: Metadata, given: str, refused_field: str, context: Context
    ) -> Iterator[None]:
        traceparent = _values(metadata, "traceparent")
        call = call_log.Call(
            "grpc",
            method,
            self._clock(),
            traceparent[-1] if traceparent else "",
            given_id=given,
            refused_field=refused_field,
        )
        call.made_by(principal.get().name)
        code = grpc.StatusCode.OK.name
        with call_log.taking(call):
            try:
                yield
            except (asyncio.CancelledError, GeneratorExit):
                code = grpc.StatusCode.CANCELLED.name
                raise
            except BaseException:
                code = _code_of(context)
                raise
            finally:
                self._metrics.grpc_calls[method, code] += 1
                call.finish(code, self._clock())


def _single(observing: Observing, behaviour: Any) -> Any:
    async def observed(request: Any, context: Context) -> Any:
        with observing(context):
            return await behaviour(request, context)

    return observed


def _streaming(observing: Observing, behaviour: Any) -> Any:
    async def observed(request: Any, context: Context) -> AsyncIterator[Any]:
        with observing(context):
            async with contextlib.aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

    return observed


def _values(metadata: Metadata, key: str) -> list[str]:
    return [value for name, value in metadata if name == key and isinstance(value, str)]


def _code_of(context: Context) -> str:
    """The code a call was aborted with; UNKNOWN for any other exception, as in gRPC."""
    # An integer or an enum member, whatever the annotation says; 0 before a code is set.
    code: Any = context.code()
    names = {key: known.name for known in grpc.StatusCode for key in (known, known.value[0])}
    return names[code] if code in names and code else grpc.StatusCode.UNKNOWN.name
