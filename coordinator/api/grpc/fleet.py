"""The coordinator's `FleetService`: workers join, renew their leases and leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc

from coordinator.workers.directory.interface import Member
from coordinator.workers.directory.joined import JoinedDirectory, Lease
from coordinator.workers.stream_protocol import PROTOCOLS
from paceline.core import limits
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InvalidArgumentError, PermissionDeniedError
from paceline.core.security.secret import WorkerSecret
from paceline.core.validation import host_and_port, require
from paceline.rpc.security.auth import PeerRole, is_local_call, names_of, roles_of
from paceline.rpc.security.credentials import is_loopback
from paceline.rpc.server.server import Server
from paceline.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""A worker that is silent for longer is listed no longer. Its sequences stay while their stream lives."""

Context = grpc.aio.ServicerContext[Any, Any]


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Keeps the leases of a JoinedDirectory."""

    def __init__(self, directory: JoinedDirectory, *, checks_roles: bool) -> None:
        """`checks_roles`: callers have certificates, which must name the role that they join as."""
        self._directory = directory
        self._checks_roles = checks_roles

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[fleet_pb2.JoinRequest], context: Context
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        """A member until the stream ends or is silent for too long.

        Raises InvalidArgumentError naming the field, PermissionDeniedError, AlreadyExistsError.
        """
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            raise InvalidArgumentError("role", "is required: the stream has no message")
        member = self._member(first, context)
        lease = self._directory.join(member, first.instance_id)
        log.info("the %s worker at %s has joined", member.role, member.address)
        reading = asyncio.create_task(_renew(requests, lease))
        try:
            yield fleet_pb2.JoinResponse(lease_seconds=LEASE_SECONDS)
            while (refusal := await lease.told.get()) is not None:
                yield fleet_pb2.JoinResponse(lease_seconds=LEASE_SECONDS, refusal=refusal)
        finally:
            reading.cancel()
            self._directory.leave(lease)
            log.info("the %s worker at %s has left", member.role, member.address)

    def _member(self, request: fleet_pb2.JoinRequest, context: Context) -> Member:
        role, address = request.role, request.address
        require(role in PROTOCOLS, "role", f"must be one of {', '.join(PROTOCOLS)}")
        require(bool(request.instance_id), "instance_id", "is required")
        most = limits.MAX_WORKER_NAME_CHARACTERS
        for name in ("address", "instance_id"):
            require(len(getattr(request, name)) <= most, name, f"at most {most} characters")
        if self._checks_roles and PeerRole(role) not in roles_of(names_of(context)):
            raise PermissionDeniedError(f"the caller's certificate does not name the role {role}")
        if address.startswith(":"):
            address = _host_of(context) + address
        host, _ = host_and_port("address", address)
        if is_loopback(host) and not is_local_call(context):
            raise InvalidArgumentError("address", f"{address} cannot be reached from the coordinator")
        return Member(role, address)


def make_join_server(
    directory: JoinedDirectory, config: CoordinatorConfig, secret: WorkerSecret | None
) -> Server:
    """The server of the join port. Raises InvalidArgumentError if it would be open to the network."""
    guarded = secret is not None or config.worker_tls is not None
    if not (guarded or is_loopback(config.host)):
        # Whoever joins as a target decides what clients read.
        raise InvalidArgumentError("join_port", f"needs worker_tls_certificate or a secret on {config.host}")
    server = Server("fleet", config.host, config.join_port or 0, tls=config.worker_tls, secret=secret)
    service = FleetService(directory, checks_roles=config.worker_tls is not None)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(service, server.grpc)
    return server


async def _renew(requests: AsyncIterator[fleet_pb2.JoinRequest], lease: Lease) -> None:
    """End the lease once the worker says goodbye or is silent for too long."""
    try:
        while True:
            async with asyncio.timeout(LEASE_SECONDS):
                await anext(requests)
    except (StopAsyncIteration, TimeoutError, grpc.aio.AioRpcError):
        pass
    finally:
        lease.told.put_nowait(None)


def _host_of(context: Context) -> str:
    """The caller's host as gRPC writes it before a port."""
    kind, _, place = unquote(context.peer()).partition(":")
    if kind not in ("ipv4", "ipv6"):
        raise InvalidArgumentError("address", "needs a host: the connection has none")
    return place.rpartition(":")[0]
