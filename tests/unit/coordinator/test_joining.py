"""Workers that join: leases, refusals and certificates, over real ports. Models are not needed for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from harness.certificates import Certificates

from coordinator.api.grpc import fleet
from coordinator.api.grpc.fleet import FleetService
from coordinator.workers.directory.interface import Member
from coordinator.workers.directory.joined import JoinedDirectory
from paceline import worker_join
from paceline.core.errors import AlreadyExistsError, InvalidArgumentError
from paceline.core.security.secret import WorkerSecret
from paceline.core.security.tls import Tls
from paceline.rpc.server.server import Server
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from paceline.worker_join import Identity, Joining, advertised

HANG = 30.0
DRAFT = Identity("draft", ":7", "one")
SECRET, OTHER = WorkerSecret("a" * 32), WorkerSecret("b" * 32)


@dataclass
class Port:
    """A coordinator's join port, and who has joined."""

    directory: JoinedDirectory
    address: str

    async def until(self, *addresses: str) -> None:
        """Until these are the members."""
        async with asyncio.timeout(HANG):
            async for members in self.directory.watch():
                if sorted(member.address for member in members) == sorted(addresses):
                    return


@contextlib.asynccontextmanager
async def join_port(
    tls: Tls | None = None, secret: WorkerSecret | None = None, number: int = 0
) -> AsyncIterator[Port]:
    directory = JoinedDirectory()
    server = Server("fleet", "127.0.0.1", number, tls=tls, secret=secret)
    service = FleetService(directory, checks_roles=tls is not None)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(service, server.grpc)
    await server.start()
    try:
        yield Port(directory, server.address)
    finally:
        await server.grpc.stop(None)


@contextlib.asynccontextmanager
async def joining(
    *places: str,
    identity: Identity = DRAFT,
    tls: Tls | None = None,
    secret: WorkerSecret | None = None,
    **more: Any,
) -> AsyncIterator[None]:
    """A worker that is a member, or tries to be, while the block lasts."""
    task = asyncio.create_task(Joining(places, identity, tls, secret, **more).run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def heard(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Until a line says so."""
    async with asyncio.timeout(HANG):
        while not any(text in record.getMessage() for record in caplog.records):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker_join, "REJOIN_SECONDS", 0.01)
    monkeypatch.setattr(worker_join, "ASK_SECONDS", 0.01)
    caplog.set_level(logging.INFO)


async def test_a_worker_is_a_member_until_it_leaves() -> None:
    async with join_port() as port:
        async with joining(port.address):
            await port.until("127.0.0.1:7")
        await port.until()


async def test_a_lease_that_is_renewed_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LEASE_SECONDS", 0.3)
    changes = []
    async with join_port() as port, joining(port.address):
        await port.until("127.0.0.1:7")
        watch = port.directory.watch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                async for members in watch:
                    changes.append(list(members))
    assert changes == [[Member("draft", "127.0.0.1:7")]]


async def test_a_silent_worker_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stands, as it does when a machine vanishes."""
    monkeypatch.setattr(fleet, "LEASE_SECONDS", 0.1)
    async with join_port() as port, grpc.aio.insecure_channel(port.address) as channel:
        stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
        call = stub.Join()
        await call.write(fleet_pb2.JoinRequest(role="target", address="10.0.0.1:7", instance_id="x"))
        await port.until("10.0.0.1:7")
        await port.until()


async def test_a_worker_joins_again_after_a_restart_of_the_port(caplog: pytest.LogCaptureFixture) -> None:
    async with contextlib.AsyncExitStack() as worker:
        async with join_port() as port:
            await worker.enter_async_context(joining(port.address))
            await port.until("127.0.0.1:7")
        await heard(caplog, "not a member at the coordinator")
        async with join_port(number=int(port.address.rpartition(":")[2])) as again:
            await again.until("127.0.0.1:7")


async def test_every_coordinator_behind_a_name_is_joined() -> None:
    async with join_port() as one:
        port = one.address.rpartition(":")[2]
        found = [["127.0.0.1"], []]

        async def resolve(host: str) -> Sequence[str]:
            assert host == "coordinators.example"
            return found[0]

        async with joining(f"dns:coordinators.example:{port}", resolve=resolve):
            await one.until("127.0.0.1:7")
            del found[0]
            await one.until()


async def test_an_unknown_name_is_told_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with join_port() as one:
        found = [OSError("no such name"), OSError("no such name"), ["127.0.0.1"]]

        async def resolve(_host: str) -> Any:
            answer = found.pop(0) if len(found) > 1 else found[0]
            if isinstance(answer, OSError):
                raise answer
            return answer

        async with joining(f"dns:gone.example:{one.address.rpartition(':')[2]}", resolve=resolve):
            await one.until("127.0.0.1:7")
    assert caplog.text.count("gone.example cannot be resolved, asking again: no such name") == 1


async def test_a_port_where_nobody_joins_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Such as the coordinator's port for clients."""
    other = Server("coordinator", "127.0.0.1", 0)
    await other.start()
    try:
        async with joining(other.address):
            await heard(caplog, "that is no join port")
    finally:
        await other.grpc.stop(None)


async def test_reasons_that_alternate_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC may end a refused call with an error of its own instead of the refusal."""
    tries = 0

    async def session(_self: Joining, _channel: Any, _address: str, told: set[str]) -> None:
        nonlocal tries
        tries += 1
        if tries == 5:
            told.clear()  # it was a member
        raise OSError(f"reason {tries % 2}")

    monkeypatch.setattr(Joining, "_session", session)
    async with joining("127.0.0.1:1"), asyncio.timeout(HANG):
        while tries < 9:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    reasons = [record.getMessage()[-8:] for record in caplog.records if "not a member" in record.message]
    assert reasons == ["reason 1", "reason 0", "reason 1", "reason 0"]


async def test_a_doubled_address_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with join_port() as port, joining(port.address):
        await port.until("127.0.0.1:7")
        async with joining(port.address, identity=Identity("draft", ":7", "two")):
            await heard(caplog, "address: another worker has joined as 127.0.0.1:7")
        await port.until("127.0.0.1:7")


def test_a_worker_takes_its_own_lease_over() -> None:
    """Its first connection may be dead without an end."""
    directory, member = JoinedDirectory(), Member("draft", "a:1")
    first = directory.join(member, "one")
    second = directory.join(member, "one")
    assert first.told.get_nowait() is None
    directory.leave(first)
    with pytest.raises(AlreadyExistsError):
        directory.join(member, "two")
    directory.leave(second)
    directory.join(member, "two")


async def test_a_member_hears_why_it_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    async with join_port() as port, joining(port.address):
        await port.until("127.0.0.1:7")
        port.directory.report(Member("draft", "127.0.0.1:7"), "vocabulary_size is 5, 6 for target t")
        await heard(caplog, "cannot use this worker: vocabulary_size is 5, 6 for target t")


@pytest.mark.parametrize(("shown", "joins"), [(SECRET, True), (OTHER, False), (None, False)])
async def test_the_secret_is_demanded(
    shown: WorkerSecret | None, joins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with join_port(secret=SECRET) as port, joining(port.address, secret=shown):
        if joins:
            await port.until("127.0.0.1:7")
        else:
            await heard(caplog, "not a member at the coordinator")
            assert await anext(port.directory.watch()) == []


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize(
    ("holder", "role", "refusal"),
    [
        ("draft", "draft", ""),
        ("target", "target", ""),
        ("draft", "target", "the caller's certificate does not name the role target"),
        ("coordinator", "target", "the caller's certificate does not allow this call"),
        ("client", "draft", "the caller's certificate does not allow this call"),
    ],
)
async def test_certificates_name_the_role(
    certificates: Certificates, holder: str, role: str, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity(role, ":7", "one")
    async with (
        join_port(tls=certificates.tls("coordinator")) as port,
        joining(port.address, identity=identity, tls=certificates.tls(holder)),
    ):
        if refusal:
            await heard(caplog, refusal)
            assert await anext(port.directory.watch()) == []
        else:
            await port.until("127.0.0.1:7")


FAR = SimpleNamespace(peer=lambda: "ipv4:192.0.2.7:4711")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("role", {}),
        ("role", {"role": "coordinator"}),
        ("instance_id", {"instance_id": ""}),
        ("instance_id", {"instance_id": "x" * 1000}),
        ("address", {"address": ""}),
        ("address", {"address": "here"}),
        ("address", {"address": "a:70000"}),
        ("address", {"address": "127.0.0.1:7"}),
        ("address", {"address": "a" * 1000 + ":7"}),
    ],
)
async def test_bad_requests_name_the_field(field: str, said: dict[str, str]) -> None:
    whole = {"role": "draft", "instance_id": "one", "address": "10.0.0.1:7"} | said if said else {}
    directory = JoinedDirectory()

    async def requests() -> AsyncIterator[Any]:
        yield fleet_pb2.JoinRequest(**whole)

    call: Any = FleetService(directory, checks_roles=False).Join(requests(), FAR)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as refused:
        await anext(call)
    assert refused.value.field == field
    assert await anext(directory.watch()) == []


async def test_a_host_is_taken_from_the_connection() -> None:
    directory = JoinedDirectory()
    waiting = asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        yield fleet_pb2.JoinRequest(role="target", instance_id="one", address=":7")
        await waiting.wait()

    call: Any = FleetService(directory, checks_roles=False).Join(requests(), FAR)  # type: ignore[arg-type]
    await anext(call)
    assert await anext(directory.watch()) == [Member("target", "192.0.2.7:7")]
    await call.aclose()
    assert await anext(directory.watch()) == []


@pytest.mark.parametrize(
    ("advertise", "host", "address", "joins_as"),
    [
        ("", "127.0.0.1", "127.0.0.1:7", "127.0.0.1:7"),
        ("", "0.0.0.0", "0.0.0.0:7", ":7"),
        ("", "::", "[::]:7", ":7"),
        ("", "worker.example", "worker.example:7", "worker.example:7"),
        ("outside.example:9", "0.0.0.0", "0.0.0.0:7", "outside.example:9"),
    ],
)
def test_a_worker_joins_with_an_address(advertise: str, host: str, address: str, joins_as: str) -> None:
    assert advertised(advertise, host, address) == joins_as
