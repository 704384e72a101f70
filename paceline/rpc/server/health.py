"""Health, as `grpc.health.v1` says it, told to each watcher at its own pace.

The servicer that comes with gRPC holds a lock while it writes: one watcher that reads nothing would keep
everybody from being told, and whoever has something to tell waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_MESSAGES: Any = health_pb2
"""With those that the type stubs do not know yet."""
Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """What is served, by name; the name of the whole process is empty."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {"": NOT_SERVING}
        self._stopping = False
        self._num_watchers = 0
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""

    def set(self, service: str, state: int) -> None:
        """Keep one of `ServingStatus`, and tell who watches; nothing after `stop`."""
        if not self._stopping:
            self._states[service] = state
            self._tell()

    def stop(self) -> None:
        """For good all that was ever set is NOT_SERVING."""
        self._stopping = True
        self._states = dict.fromkeys(self._states, NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - the service's name for it
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Raises NotFoundError for a name that nobody has set."""
        state = self._states.get(_name(request))
        if state is None:
            raise NotFoundError("no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def List(  # noqa: N802 - the service's name for it
        self, request: Any, context: Context
    ) -> Any:
        """The state of each name that was set."""
        response = _MESSAGES.HealthListResponse()
        for service, state in self._states.items():
            response.statuses[service].status = state
        return response

    async def Watch(  # noqa: N802 - the service's name for it
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state, and then each other one, up to `stop`; what changes while a watcher does not read it is
        left out. Raises ResourceExhaustedError where too many watch."""
        name = _name(request)
        if self._num_watchers >= limits.MAX_HEALTH_WATCHERS:
            raise ResourceExhaustedError("too many watch the health of this process")
        self._num_watchers += 1
        try:
            async with contextlib.aclosing(self._told(name)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._num_watchers -= 1

    async def _told(self, name: str) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        told = None
        while True:
            # Taken before the state is looked at, which may change while the watcher is told.
            changed = self._changed
            state = self._states.get(name, SERVICE_UNKNOWN)
            if state != told:
                yield health_pb2.HealthCheckResponse(status=state)
                told = state
            if self._stopping and changed is self._changed:
                return
            await changed.wait()


def _name(request: health_pb2.HealthCheckRequest) -> str:
    most = limits.MAX_HEALTH_SERVICE_CHARACTERS
    if len(request.service) > most:
        raise InvalidArgumentError("service", f"at most {most} characters")
    return request.service
