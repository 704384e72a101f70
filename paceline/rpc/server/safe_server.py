"""A grpc.aio server that no method's name can end.

grpc.aio decodes the name of each method in the loop that takes calls, before any interceptor: at one that is
not UTF-8 the loop ends, and a process lives on that nobody reaches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

KNOWN_VERSIONS: Final = ("1.85.",)
"""Of grpcio, in which what is used here is not public: as other versions may have it, it could do harm."""

UNKNOWN_METHOD = "/paceline.unknown/unknown"
"""What interceptors are told of a method that nobody registered, whatever the caller called it."""


class _Accepting(cygrpc.AioServer):  # type: ignore[misc]
    """gRPC finds methods that are registered by their bytes. Calls of all others are taken here, and nobody
    looks at their names."""

    def __init__(self, *args: Any) -> None:
        self.interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
        self._generic: list[grpc.GenericRpcHandler] = []
        self._running: set[asyncio.Task[None]] = set()
        super().__init__(*args)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """One that serves methods by their names never sees an unregistered one's."""
        super().add_generic_rpc_handlers(handlers)
        self._generic.extend(handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """The next call of a registered method; where gRPC asks for one of another, only an error comes."""
        if method is None:
            return asyncio.get_running_loop().create_task(self._take_others())
        return super()._make_request_call_future(method)

    async def _take_others(self) -> None:
        """Raises gRPC's own error for a call that it could not take, as when the server stops."""
        loop = asyncio.get_running_loop()
        resolver = cygrpc._MethodResolver(self._generic, {})
        while True:
            state = await self._request_call()
            call = cygrpc._handle_rpc(UNKNOWN_METHOD, resolver, self.interceptors, state, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(call, state, loop, UNKNOWN_METHOD))
            self._running.add(task)
            task.add_done_callback(self._running.discard)


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """A server whose methods are all registered: by services, or by `add_registered_method_handlers`.

    With a version of grpcio that is not known here it is gRPC's own.
    """
    if not grpc.__version__.startswith(KNOWN_VERSIONS):
        log.warning("grpcio %s may stop taking calls at a method's name that is no UTF-8", grpc.__version__)
        return grpc.aio.server(interceptors=interceptors, options=options)
    # grpc.aio names the class that it makes, and its arguments change from version to version.
    plain = cygrpc.AioServer
    cygrpc.AioServer = _Accepting
    try:
        server = grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain
    inner: Any = server._server  # type: ignore[attr-defined]
    inner.interceptors = tuple(interceptors)
    return server


def takes_calls(server: grpc.aio.Server) -> bool:
    """False once a server that was started has stopped taking calls, by itself or because it was told to."""
    is_running = getattr(getattr(server, "_server", None), "is_running", None)
    return is_running is None or bool(is_running())
