"""A grpc.aio server that survives invalid method names.

grpc.aio decodes method names in its accept loop, before any interceptor. A name that is not UTF-8 ends that
loop, after which the process still runs but accepts no calls.
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
"""Versions of grpcio for which this use of private parts is known to be safe."""

UNKNOWN_METHOD = "/paceline.unknown/unknown"
"""Method name that interceptors receive for unregistered methods."""


class _Accepting(cygrpc.AioServer):  # type: ignore[misc]
    """gRPC matches registered methods by bytes. This class accepts calls of all other methods without
    decoding their names."""

    def __init__(self, *args: Any) -> None:
        self.interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
        self._generic: list[grpc.GenericRpcHandler] = []
        self._running: set[asyncio.Task[None]] = set()
        super().__init__(*args)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add handlers; a handler that matches by name never sees an unregistered method's name."""
        super().add_generic_rpc_handlers(handlers)
        self._generic.extend(handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """The next call of a registered method. For other methods, the future only ever raises."""
        if method is None:
            return asyncio.get_running_loop().create_task(self._take_others())
        return super()._make_request_call_future(method)

    async def _take_others(self) -> None:
        """Handle calls of unregistered methods. Raises gRPC's error when the server stops."""
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
    """A server whose methods are all registered, by services or by `add_registered_method_handlers`.

    With an unknown version of grpcio, it is a plain grpc.aio server.
    """
    if not grpc.__version__.startswith(KNOWN_VERSIONS):
        log.warning(
            "grpcio %s may stop accepting calls after a method name that is not UTF-8", grpc.__version__
        )
        return grpc.aio.server(interceptors=interceptors, options=options)
    # grpc.aio looks up the class by name, so it is replaced during construction.
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
    """False after a started server has stopped accepting calls for any reason."""
    is_running = getattr(getattr(server, "_server", None), "is_running", None)
    return is_running is None or bool(is_running())
