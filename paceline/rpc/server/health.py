"""The health service `grpc.health.v1`, with independent watchers.

gRPC's own servicer holds a lock while it writes: one watcher that does not read would block all other
watchers and every status change.
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
"""Untyped, for messages that are missing in the type stubs."""
Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """Serving states by service name; the empty name is the whole process."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {"": NOT_SERVING}
        self._stopping = False
        self._num_watchers = 0
        self._changed = asyncio.Event()
        """Set at the next change and then replaced."""

    def set(self, service: str, state: int) -> None:
        """Set a `ServingStatus` and notify watchers; ignored after `stop`."""
        if not self._stopping:
            self._states[service] = state
            self._tell()

    def stop(self) -> None:
        """Set all services to NOT_SERVING for good."""
        self._stopping = True
        self._states = dict.fromkeys(self._states, NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - the name in the service definition
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Raises NotFoundError for an unknown name."""
        state = self._states.get(_name(request))
        if state is None:
            raise NotFoundError("no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def List(  # noqa: N802 - the name in the service definition
        self, request: Any, context: Context
    ) -> Any:
        """The state of each known name."""
        response = _MESSAGES.HealthListResponse()
        for service, state in self._states.items():
            response.statuses[service].status = state
        return response

    async def Watch(  # noqa: N802 - the name in the service definition
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Stream the state and its changes until `stop`. Changes during a slow watcher's pause are skipped.
        Raises ResourceExhaustedError for too many watchers."""
        name = _name(request)
        if self._num_watchers >= limits.MAX_HEALTH_WATCHERS:
            raise ResourceExhaustedError("too many health watchers of this process")
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
            # Taken before reading the state, which may change while the answer is sent.
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
