"""The coordinator's `ProfileService`: passes profiles of its workers on to operators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.app import Coordinator
from coordinator.auth import principal
from coordinator.workers.links import Link
from paceline.core.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError
from paceline.rpc.codec.profile import profile_call_from_proto
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.security.auth import is_local_call
from paceline.v1 import profile_pb2, profile_pb2_grpc


class ProfileService(profile_pb2_grpc.ProfileServiceServicer):
    """Profiles a worker for the holder of an admin key; without keys, for callers on this machine."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Profile(  # noqa: N802
        self, request: profile_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[profile_pb2.ProfileResponse]:
        """The trace of the worker, as it arrives."""
        self._check(context)
        call = profile_call_from_proto(request)
        link = self._link(call.worker or "target")
        try:
            async for response in link.profile(call.seconds):
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._coordinator.gate.asks_for_keys:
            if not principal.get().admin:
                raise PermissionDeniedError("a profile requires an admin key")
        elif not is_local_call(context):
            raise PermissionDeniedError("without API keys, profiles are for callers on this machine only")

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
