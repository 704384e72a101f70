"""The generation service behind Serve's gRPC proxy.

A call through the proxy has a context without deadline, and an exception in it loses its details and shows
its traceback. So a call that fails sets its status on the context and answers an empty message: Serve sends
the status along with messages only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from coordinator.api.grpc.service import GenerationService
from paceline.v1 import generation_pb2 as pb

_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GenerationService"]
STREAMING = frozenset({"Generate"})
UNARY = tuple(method.name for method in _DESCRIPTOR.methods if method.name not in STREAMING)


class _EndedError(Exception):
    """The call has got its final status."""


class ProxiedContext:
    """What the service and the interceptors ask of a call's context, over Serve's."""

    def __init__(self, context: Any) -> None:
        """`context` is a RayServegRPCContext."""
        self._context = context

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """The client's metadata."""
        given: Sequence[tuple[str, str]] = self._context.invocation_metadata()
        return given

    def time_remaining(self) -> None:
        """Unknown: the proxy cancels the call at its deadline."""

    def code(self) -> Any:
        """The status code so far."""
        return self._context.code()

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """The proxy sends its own."""

    async def abort_with_status(self, status: Any) -> None:
        """End the call with this status."""
        self._context.set_code(status.code)
        self._context.set_details(status.details)
        self._context.set_trailing_metadata([(key, value) for key, value in status.trailing_metadata or ()])
        raise _EndedError


@dataclass(frozen=True, slots=True)
class _Details:
    """Of a call, as interceptors see it."""

    method: str
    invocation_metadata: Sequence[tuple[str, str]]


class ProxiedService:
    """Runs the service's methods behind the interceptors that guard them on the coordinator's own port."""

    def __init__(
        self, service: GenerationService, interceptors: Sequence[grpc.aio.ServerInterceptor]
    ) -> None:
        """`interceptors` in the order in which they see a call."""
        self._service = service
        self._interceptors = interceptors

    async def unary(self, name: str, request: Any, context: Any) -> Any:
        """The answer of a method with a single one; an empty message if the call failed."""
        proxied = ProxiedContext(context)
        try:
            return await (await self._behaviour(name, proxied))(request, proxied)
        except _EndedError:
            return getattr(pb, _DESCRIPTOR.methods_by_name[name].output_type.name)()

    async def streaming(self, name: str, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """The answers of a method with several; the last one is empty if the call failed."""
        proxied = ProxiedContext(context)
        try:
            behaviour = await self._behaviour(name, proxied)
            if inspect.isasyncgenfunction(behaviour):
                # A cancelled call must end its handler at once, not at garbage collection.
                async with contextlib.aclosing(behaviour(request, proxied)) as answers:
                    async for answer in answers:
                        yield answer
            else:
                await behaviour(request, proxied)  # a refusal
        except _EndedError:
            yield getattr(pb, _DESCRIPTOR.methods_by_name[name].output_type.name)()

    async def _behaviour(self, name: str, context: ProxiedContext) -> Callable[[Any, Any], Any]:
        """The method behind all interceptors."""
        details: Any = _Details(f"/{_DESCRIPTOR.full_name}/{name}", context.invocation_metadata())
        streams = name in STREAMING
        # The interceptors expect a stream of requests, as on the own port, and pass on what they are given.
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler

        async def method(_details: grpc.HandlerCallDetails) -> Any:
            return make(getattr(self._service, name))

        chain: Callable[[Any], Awaitable[Any]] = method
        for interceptor in reversed(self._interceptors):
            chain = functools.partial(interceptor.intercept_service, chain)
        handler = await chain(details)
        behaviour: Callable[[Any, Any], Any] = handler.stream_stream or handler.stream_unary
        return behaviour
