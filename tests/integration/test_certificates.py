"""Certificates of `paceline certificates` on real ports: roles, and which calls are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.certificates import Certificates, make, says_nothing
from harness.refusals import ends_with, refused
from harness.waiting import HANG

from coordinator.api.http.server.encoding import JsonResponse
from coordinator.api.http.server.server import HttpServer
from coordinator.workers.links import Link, LinkObserver
from coordinator.workers.stream_protocol import TARGET
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.tls import Tls
from paceline.rpc.security.auth import PeerRole
from paceline.rpc.security.credentials import check_files, open_aio_channel
from paceline.rpc.server.server import CHANNEL_OPTIONS, Server
from paceline.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_worker.service import TargetService

SECRET = "a word of the model's own"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made(tmp_path_factory.mktemp("authority") / "files")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of another authority."""
    return Certificates.made(tmp_path_factory.mktemp("strangers") / "files")


class Shell:
    """What a worker's service asks of a worker, without a model."""

    thread: Any = None

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.failing = False

    async def info(self) -> common_pb2.WorkerInfo:
        if self.failing:
            raise RuntimeError(SECRET)
        return common_pb2.WorkerInfo(role="target", model="m")


@contextlib.asynccontextmanager
async def target_worker(tls: Tls | None, shell: Shell | None = None) -> AsyncIterator[str]:
    """A target worker's port, with its real service; its address."""
    server = Server("target", "127.0.0.1", 0, tls=tls)
    service = TargetService(cast("Any", shell or Shell()))
    target_pb2_grpc.add_TargetServiceServicer_to_server(service, server.grpc)
    await server.start()
    await server.set_serving(True)
    try:
        yield server.address
    finally:
        await server.grpc.stop(None)


async def ask(address: str, tls: Tls | None) -> Any:
    """GetWorkerInfo; what a coordinator begins with."""
    async with open_aio_channel(address, CHANNEL_OPTIONS, tls) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return await stub.GetWorkerInfo(target_pb2.TargetServiceGetWorkerInfoRequest(), timeout=HANG)


async def refusal(address: str, tls: Tls | None) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ask(address, tls)
    return failure.value


# ---- the script -----------------------------------------------------------------------------------


def test_key_files_are_readable_by_their_owner_only(certificates: Certificates) -> None:
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in certificates.folder.iterdir()}
    names = ["ca", *(role.value for role in PeerRole)]
    assert {name for name in modes if name.endswith(".key")} == {f"{name}.key" for name in names}
    assert all(mode == 0o600 for name, mode in modes.items() if name.endswith(".key"))
    assert stat.S_IMODE(certificates.folder.stat().st_mode) == 0o700


def test_existing_certificate_files_are_not_overwritten(certificates: Certificates) -> None:
    before = {file.name: file.read_bytes() for file in certificates.folder.iterdir()}
    again = make(certificates.folder)
    assert again.returncode != 0
    assert "exists" in again.stderr
    one = make(certificates.folder, "--role", "target", "--role", "draft")
    assert one.returncode != 0
    assert {file.name: file.read_bytes() for file in certificates.folder.iterdir()} == before


def test_an_incomplete_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    assert "must contain both" in make(tmp_path).stderr
    assert [file.name for file in tmp_path.iterdir()] == ["ca.pem"]


async def test_an_existing_authority_issues_another_certificate(tmp_path: Path) -> None:
    made = Certificates.made(tmp_path / "files")
    run = make(made.folder, "--role", "target", "--name", "target-b", "--host", "gpu-b")
    assert run.returncode == 0, run.stderr
    async with target_worker(made.tls("target-b")) as address:
        name = PeerRole.TARGET.dns_name
        assert (await ask(address, made.tls("coordinator", server_name=name))).info.model == "m"
        assert (await ask(address, made.tls("coordinator", server_name="gpu-b"))).info.model == "m"


# ---- a worker's port ------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["target", "draft", "client"])
async def test_only_a_coordinator_may_call_a_worker(role: str, certificates: Certificates) -> None:
    async with target_worker(certificates.tls("target")) as address:
        error = await refusal(address, certificates.tls(role))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        says_nothing(error.details() or "", role, str(certificates.folder))
        async with open_aio_channel(address, CHANNEL_OPTIONS, certificates.tls(role)) as channel:
            verify = target_pb2_grpc.TargetServiceStub(channel).Verify()
            with ends_with(grpc.StatusCode.PERMISSION_DENIED):
                # It is refused before it has sent a frame.
                async for _ in verify:
                    pass
            unknown = channel.unary_unary("/paceline.v1.TargetService/NoSuchMethod")
            with ends_with(grpc.StatusCode.PERMISSION_DENIED):
                await unknown(b"", timeout=HANG)


async def test_any_certificate_of_the_authority_may_check_health(certificates: Certificates) -> None:
    async with (
        target_worker(certificates.tls("target")) as address,
        open_aio_channel(address, CHANNEL_OPTIONS, certificates.tls("draft")) as channel,
    ):
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HANG
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_without_a_certificate_is_not_connected(
    certificates: Certificates, strangers: Certificates
) -> None:
    async with target_worker(certificates.tls("target")) as address:
        for tls in (None, Tls(ca=certificates.ca), strangers.tls("coordinator", ca=certificates.ca)):
            assert (await refusal(address, tls)).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_coordinator_rejects_a_foreign_workers_certificate(
    certificates: Certificates, strangers: Certificates
) -> None:
    async with target_worker(strangers.tls("target", ca=certificates.ca)) as address:
        error = await refusal(address, certificates.tls("coordinator"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


@contextlib.asynccontextmanager
async def linked(address: str, tls: Tls) -> AsyncIterator[tuple[Link, asyncio.Event]]:
    """A coordinator's link to the target at `address`; the event tells of each time it was judged."""
    judged = asyncio.Event()

    class Watched(Link):
        def _end(self, reason: str) -> None:
            super()._end(reason)
            judged.set()

    observer = LinkObserver(
        admit=lambda _link, _info: None,
        ready=lambda _link: judged.set(),
        lost=lambda _link: None,
        events=lambda _link, _events: None,
    )
    link = Watched(address, TARGET, observer, tls)
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(HANG):
            await judged.wait()
            yield link, judged
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_link_connects_to_the_expected_role(certificates: Certificates) -> None:
    async with (
        target_worker(certificates.tls("target")) as address,
        linked(address, certificates.tls("coordinator")) as (link, _),
    ):
        assert link.ready


async def test_a_draft_certificate_at_the_target_address_is_refused(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.workers.links.INFO_SECONDS", 0.5)
    async with (
        target_worker(certificates.tls("draft")) as address,
        linked(address, certificates.tls("coordinator")) as (link, _),
    ):
        assert not link.ready
        assert "must name target.paceline.internal" in link.reason


async def test_a_link_with_a_workers_certificate_is_told_why_it_fails(certificates: Certificates) -> None:
    async with (
        target_worker(certificates.tls("target")) as address,
        linked(address, certificates.tls("draft")) as (link, _),
    ):
        assert not link.ready
        assert link.reason.startswith("permission_denied")


# ---- whatever fails -------------------------------------------------------------------------------


async def test_failures_tell_no_more_than_their_code(certificates: Certificates) -> None:
    shell = Shell()
    shell.failing = True
    async with target_worker(None, shell) as address:
        error = await refusal(address, None)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
        assert SECRET not in str(error.trailing_metadata())
        async with open_aio_channel(address, (), None) as channel:
            for name, code in {
                "GetWorkerInfo": grpc.StatusCode.INVALID_ARGUMENT,
                "NoSuchMethod": grpc.StatusCode.UNIMPLEMENTED,
            }.items():
                call = channel.unary_unary(f"/paceline.v1.TargetService/{name}")
                with ends_with(code) as failure:
                    await call(b"\xff\xff", timeout=HANG)
                says_nothing(failure.value.details() or "", "DecodeError")
            stream = channel.stream_stream("/paceline.v1.TargetService/Verify")(timeout=HANG)
            await stream.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                async for _ in stream:
                    pass
            says_nothing(failure.value.details() or "", "DecodeError")


@pytest.mark.parametrize("room", [-200, 200])
async def test_the_headers_of_a_call_are_bounded(room: int) -> None:
    size = limits.MAX_METADATA_BYTES + room - 400  # what gRPC itself sends is counted too
    metadata = [(f"x-{i}", "y" * 900) for i in range(size // 940)]
    async with target_worker(None) as address, open_aio_channel(address, (), None) as channel:
        call = channel.unary_unary("/paceline.v1.TargetService/GetWorkerInfo")
        if room < 0:
            await call(b"", metadata=metadata[:-1], timeout=HANG)
            return
        with ends_with(grpc.StatusCode.RESOURCE_EXHAUSTED):
            await call(b"", metadata=[*metadata, ("x-more", "y" * 2000)], timeout=HANG)


# ---- files that cannot be used --------------------------------------------------------------------


def bad_files(made: Certificates, folder: Path) -> Iterator[tuple[Tls, str]]:
    (folder / "text").write_text("nothing")
    text, none = str(folder / "text"), str(folder / "none")
    good = made.tls("target")
    yield Tls(certificate=none, key=good.key), "tls_certificate"
    yield Tls(certificate=good.certificate, key=none), "tls_key"
    yield Tls(certificate=good.certificate, key=made.tls("draft").key), "tls_key"
    yield Tls(certificate=text, key=good.key), "tls_key"
    yield Tls(certificate=good.certificate, key=text), "tls_key"
    yield Tls(certificate=good.certificate, key=good.key, ca=text), "tls_ca"
    yield Tls(ca=none), "tls_ca"


def test_unusable_tls_files_are_named(certificates: Certificates, tmp_path: Path) -> None:
    for tls, field in bad_files(certificates, tmp_path):
        with refused(field):
            check_files(tls)
    check_files(certificates.tls("target"))
    check_files(Tls())


async def test_a_server_with_bad_files_does_not_start(certificates: Certificates) -> None:
    good = certificates.tls("target")
    server = Server("target", "127.0.0.1", 0, tls=Tls(certificate=good.certificate, key=good.certificate))
    with pytest.raises(InvalidArgumentError):
        await server.start()
    await server.grpc.stop(None)


def test_retry_info_follows_googles_error_model() -> None:
    from paceline.core.errors import ResourceExhaustedError
    from paceline.rpc.codec.status import to_status

    status = status_pb2.Status.FromString(to_status(ResourceExhaustedError("m", 1.5)).SerializeToString())
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details if detail.Is(retry.DESCRIPTOR))
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


async def test_a_tls_client_that_does_not_read_is_cut(certificates: Certificates) -> None:
    """Encrypted bytes that do not leave must count as unread."""

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await JsonResponse("y" * 2**24)(scope, receive, send)

    tls = certificates.tls("coordinator", ca="")
    server = HttpServer(large, "127.0.0.1", 0, tls, unread_timeout=0.05)
    await server.start()
    host, port = server.address.split(":")
    context = certificates.context(None)
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    try:
        async with asyncio.timeout(HANG):
            connections = server._uvicorn.server_state.connections
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while not any(connection.cycle for connection in connections):  # noqa: ASYNC110
                await asyncio.sleep(0)
            while connections:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await server.stop(1)
