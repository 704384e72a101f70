"""`paceline profile`: traces of real workers, bounds, and who may ask."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from harness.commands import command
from harness.pair import Pair
from harness.secret import SECRET
from harness.stacks import RunningStack, own_coordinator, own_worker
from harness.waiting import HANG, until

from coordinator.api.grpc.admin import AdminService
from paceline import worker_admin
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PermissionDeniedError, ResourceExhaustedError
from paceline.core.security.keyfile import write_keys
from paceline.core.security.keys import ApiKey, KeyRing, digest
from paceline.engine.profiling import EngineProfile
from paceline.v1 import admin_pb2, admin_pb2_grpc

LONG = limits.MAX_PROFILE_SECONDS


@contextlib.contextmanager
def asked(address: str, secret: bool = False, **request: Any) -> Iterator[Any]:
    """A call, which begins at once and ends with the block."""
    with grpc.insecure_channel(address) as channel:
        call: Any = admin_pb2_grpc.AdminServiceStub(channel).Profile(
            admin_pb2.ProfileRequest(**request), timeout=HANG, metadata=SECRET.metadata if secret else None
        )
        yield call
        call.cancel()


def refusal(address: str, **request: Any) -> grpc.RpcError | None:
    """The error of a call; None if it sends a trace."""
    with asked(address, **request) as call:
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return error
    return None


def code_of(error: Any) -> grpc.StatusCode | None:
    return None if error is None else error.code()


def names_in(trace: bytes) -> set[str]:
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return {event.get("name", "") for event in events}


@contextlib.contextmanager
def busy(stack: RunningStack) -> Iterator[None]:
    """Both workers have rounds until the block ends."""
    ended = threading.Event()
    speculation = {"num_speculative_tokens": 3, "prompt_lookup": False}

    def ask() -> None:
        while not ended.is_set():
            stack.client.generate(
                [5, 6, 7], {"max_tokens": 64, "ignore_eos": True}, speculation=speculation, timeout=HANG
            )

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            ended.set()
        asking.result()


@pytest.mark.parametrize("worker", ["", "target", "draft", "address"])
def test_a_trace_has_the_steps_of_a_worker(stack: RunningStack, tmp_path: Path, worker: str) -> None:
    file = tmp_path / "trace.json.gz"
    name = stack.stack.address_of("draft") if worker == "address" else worker

    def has_steps() -> bool:
        words = ["--worker", name] if name else []
        done = command("profile", stack.address, "--seconds", "0.5", "--output", str(file), *words)
        assert done.returncode == 0, done.stderr
        size = f"{file.stat().st_size:,}"
        assert done.stdout == f"{file}: {size} bytes; https://ui.perfetto.dev shows it\n"
        return "step" in names_in(file.read_bytes())

    with busy(stack):
        until(has_steps, "a step in a trace", timeout=HANG)
    stack.good_request()


@pytest.mark.parametrize("seconds", ["0", "-1", "10.1", "nan", "inf"])
def test_seconds_are_bounded_by_name(stack: RunningStack, tmp_path: Path, seconds: str) -> None:
    done = command("profile", stack.address, "--seconds", seconds, "--output", str(tmp_path / "t"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --seconds: must be ")
    error: Any = refusal(stack.address, seconds=float(seconds))
    assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT
    assert "seconds: must be " in error.details()


def test_an_unknown_worker_is_refused_by_name(stack: RunningStack, tmp_path: Path) -> None:
    done = command("profile", stack.address, "--worker", "third", "--output", str(tmp_path / "t"))
    assert done.returncode == 2
    assert "error: --worker: there is no third; there are target 127.0.0.1:" in done.stderr


def test_a_folder_that_is_not_there_is_refused(stack: RunningStack, tmp_path: Path) -> None:
    done = command("profile", stack.address, "--output", str(tmp_path / "none" / "t"))
    assert done.returncode == 2
    assert "error: --output: " in done.stderr


def test_one_profile_is_taken_at_a_time(stack: RunningStack) -> None:
    """Who leaves ends a profile; the next one is taken as soon as the profiler has stopped."""

    def code(**request: Any) -> grpc.StatusCode | None:
        return code_of(refusal(stack.address, **request))

    with asked(stack.address, seconds=LONG):
        until(lambda: code(seconds=0.01) is grpc.StatusCode.RESOURCE_EXHAUSTED, "the first profile")
        assert code(seconds=0.01, worker="draft") is None
    until(lambda: code(seconds=0.01) is None, "the end of the first profile")


def test_a_large_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROFILE_BYTES", 10)
    profile = EngineProfile()
    profile.start()
    profile.stop()
    with pytest.raises(ResourceExhaustedError, match="ask for fewer seconds"):
        profile.save()


def test_a_worker_with_a_secret_refuses_those_without(stack: RunningStack) -> None:
    address = stack.stack.address_of("target")
    assert code_of(refusal(address, seconds=0.1)) is grpc.StatusCode.UNAUTHENTICATED
    with asked(address, secret=True, seconds=0.1) as call:
        assert names_in(b"".join(part.trace for part in call))


def test_an_admin_key_is_demanded_where_there_are_keys(pair_paths: Pair, tmp_path: Path) -> None:
    keys, file = tmp_path / "keys.json", tmp_path / "trace.json.gz"
    holders = {"pl-plain": False, "pl-admin": True}
    write_keys(
        keys,
        KeyRing(ApiKey(name=token, sha256=digest(token), admin=admin) for token, admin in holders.items()),
    )
    with (
        own_worker("target", pair_paths.target) as target,
        own_coordinator(pair_paths, [target], api_keys=str(keys)) as coordinator,
    ):
        words = "profile", coordinator.address, "--seconds", "0.1", "--output", str(file), "--api-key"
        asked_with = {token: command(*words, token) for token in (*holders, "pl-wrong")}
    assert {token: done.returncode for token, done in asked_with.items()} == {
        "pl-plain": 1,
        "pl-admin": 0,
        "pl-wrong": 1,
    }
    assert "orders to workers require an admin key" in asked_with["pl-plain"].stderr
    assert "a valid API key is required" in asked_with["pl-wrong"].stderr


class FarCall:
    def peer(self) -> str:
        return "ipv4:192.0.2.7:4711"


async def test_callers_elsewhere_are_refused_by_a_coordinator_without_keys() -> None:
    coordinator: Any = SimpleNamespace(gate=SimpleNamespace(asks_for_keys=False), links=())
    await check_refusals(AdminService(coordinator), "this machine only")


async def test_callers_elsewhere_are_refused_by_an_open_worker() -> None:
    async def drain() -> worker_admin.HandedOver:
        raise AssertionError("drained")

    thread: Any = None
    await check_refusals(worker_admin.WorkerAdminService(thread, drain, guarded=False), "its machine only")


async def test_a_named_worker_is_refused_by_a_worker() -> None:
    """The caller takes it for a coordinator, and may mean another worker."""

    async def drain() -> worker_admin.HandedOver:
        raise AssertionError("drained")

    thread: Any = None
    service: Any = worker_admin.WorkerAdminService(thread, drain, guarded=True)
    with pytest.raises(InvalidArgumentError, match="worker: is for coordinators"):
        await anext(service.Profile(admin_pb2.ProfileRequest(seconds=1, worker="target"), FarCall()))
    with pytest.raises(InvalidArgumentError, match="worker: is for coordinators"):
        await service.Drain(admin_pb2.DrainRequest(worker="127.0.0.1:7"), FarCall())


async def check_refusals(service: Any, told: str) -> None:
    """No method takes orders from another machine."""
    with pytest.raises(PermissionDeniedError, match=told):
        await anext(service.Profile(admin_pb2.ProfileRequest(seconds=1), FarCall()))
    with pytest.raises(PermissionDeniedError, match=told):
        await service.Drain(admin_pb2.DrainRequest(worker="target"), FarCall())
