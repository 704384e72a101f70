"""The coordinator's `AdminService`: passes operators' calls on to its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.app import Coordinator
from coordinator.auth import principal
from coordinator.workers.links import Link
from paceline.core.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError
from paceline.core.validation import require
from paceline.rpc.codec.drain import drain_call_from_proto
from paceline.rpc.codec.profile import profile_call_from_proto
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.security.auth import is_local_call
from paceline.v1 import admin_pb2, admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """For the holder of an admin key; without keys, for callers on this machine."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Profile(  # noqa: N802
        self, request: admin_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[admin_pb2.ProfileResponse]:
        """The trace of the worker, as it arrives."""
        self._check(context)
        call = profile_call_from_proto(request)
        link = self._link(call.worker or "target")
        try:
            async for response in link.profile(call.seconds):
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def Drain(  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DrainResponse:
        """The worker's answer, once it has handed its sequences over."""
        self._check(context)
        call = drain_call_from_proto(request)
        require(bool(call.worker), "worker", "is required: a role or an address")
        try:
            return await self._link(call.worker).drain()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._coordinator.gate.asks_for_keys:
            if not principal.get().admin:
                raise PermissionDeniedError("orders to workers require an admin key")
        elif not is_local_call(context):
            raise PermissionDeniedError("without API keys, orders to workers come from this machine only")

    def _link(self, worker: str) -> Link:
        """The connected worker of this role or address. Raises InvalidArgumentError, UnavailableError."""
        links = [link for link in self._coordinator.links if worker in (link.role, link.address)]
        if not links:
            known = ", ".join(f"{link.role} {link.address}" for link in self._coordinator.links)
            raise InvalidArgumentError("worker", f"there is no {worker}; there are {known}")
        ready = [link for link in links if link.ready]
        if not ready:
            raise UnavailableError(f"{worker}: no such worker is ready")
        if len(ready) > 1:
            addresses = ", ".join(link.address for link in ready)
            raise InvalidArgumentError(
                "worker", f"{worker} are several; name one by its address: {addresses}"
            )
        return ready[0]
