"""A worker joins its coordinators, and stays a member of each until it stops."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from paceline.core.errors import PacelineError
from paceline.core.security.secret import WorkerSecret
from paceline.core.security.tls import Tls
from paceline.core.validation import host_and_port
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.resolve import ASK_SECONDS, Resolve, follow, resolve
from paceline.rpc.security.auth import PeerRole
from paceline.rpc.security.credentials import open_aio_channel
from paceline.rpc.server.server import CHANNEL_OPTIONS
from paceline.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

REJOIN_SECONDS = 1.0
RENEWALS = 3
"""Renewals in the time of a lease: two of them may be lost."""
_DNS = "dns:"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself when it joins."""

    role: str
    address: str
    """host:port; without a host, the coordinator takes that of the connection."""
    instance_id: str


class Joining:
    """Keeps a worker a member of its coordinators."""

    def __init__(
        self,
        places: Sequence[str],
        identity: Identity,
        tls: Tls | None,
        secret: WorkerSecret | None,
        resolve: Resolve = resolve,
    ) -> None:
        """`places` are HOST:PORT of coordinators' join ports, or `dns:HOST:PORT` of all behind a name."""
        self._places = places
        self._identity = identity
        self._tls = tls and replace(tls, server_name=PeerRole.COORDINATOR.dns_name)
        self._metadata = () if secret is None else secret.metadata
        self._resolve = resolve

    async def run(self) -> None:
        """Join, and join again whenever a membership ends, until cancelled. Cancelling leaves."""
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                if place.startswith(_DNS):
                    group.create_task(self._follow(place.removeprefix(_DNS)))
                else:
                    group.create_task(self._belong(place))

    async def _follow(self, place: str) -> None:
        """Belong to every coordinator behind a name."""
        host, port = host_and_port("join", place)
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for addresses in follow(host, port, self._resolve, ASK_SECONDS):
                found = set(addresses)
                for address in tasks.keys() - found:
                    tasks.pop(address).cancel()
                for address in found - tasks.keys():
                    tasks[address] = group.create_task(self._belong(address))

    async def _belong(self, address: str) -> None:
        told: set[str] = set()
        while True:
            try:
                async with open_aio_channel(address, CHANNEL_OPTIONS, self._tls) as channel:
                    await self._session(channel, address, told)
                why = "it ended the membership"
            except grpc.aio.AioRpcError as error:
                why = _told(error)
            except (PacelineError, OSError) as error:
                why = str(error)
            if why not in told:
                log.warning("not a member at the coordinator %s: %s", address, why)
                told.add(why)
            await asyncio.sleep(REJOIN_SECONDS)

    async def _session(self, channel: grpc.aio.Channel, address: str, told: set[str]) -> None:
        """One membership, from its beginning to its end.

        `told` are the reasons logged since the last one. A refused call may also end with an error of gRPC's
        own, so they alternate.
        """
        lease: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
        async for answer in stub.Join(self._requests(lease), metadata=self._metadata):
            if not lease.done():
                log.info("joined the coordinator at %s", address)
                lease.set_result(answer.lease_seconds)
                told.clear()
            if answer.refusal:
                log.error("the coordinator at %s cannot use this worker: %s", address, answer.refusal)

    async def _requests(self, lease: asyncio.Future[float]) -> AsyncIterator[fleet_pb2.JoinRequest]:
        mine = self._identity
        yield fleet_pb2.JoinRequest(role=mine.role, address=mine.address, instance_id=mine.instance_id)
        seconds = await lease / RENEWALS
        while True:
            await asyncio.sleep(seconds)
            yield fleet_pb2.JoinRequest()


def _told(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "that is no join port (a coordinator's --join-port)"
    return str(from_rpc_error(error))


def advertised(advertise: str, host: str, address: str) -> str:
    """The address to join with: `advertise`, or the server's own, without its host if it listens on all."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host.strip("[]")).is_unspecified:
            address = f":{address.rpartition(':')[2]}"
    return advertise or address
