"""Health checks and reflection as tools of the gRPC ecosystem use them, for every process."""

from __future__ import annotations

import contextlib
import signal
import threading

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from harness.history import Recording
from harness.refusals import ends_with
from harness.stacks import RunningStack, own_coordinator, own_worker
from harness.waiting import HANG

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {
    "coordinator": "paceline.v1.GenerationService",
    "target": "paceline.v1.TargetService",
    "draft": "paceline.v1.DraftService",
}


def test_reflection_is_off_by_default(stack: RunningStack) -> None:
    for role in SERVICES:
        with grpc.insecure_channel(stack.stack.address_of(role)) as channel:
            coordinator = role == "coordinator"
            expected = grpc.StatusCode.UNIMPLEMENTED if coordinator else grpc.StatusCode.UNAUTHENTICATED
            with ends_with(expected):
                list(ProtoReflectionDescriptorDatabase(channel).get_services())


@pytest.mark.parametrize("role", SERVICES)
def test_a_health_probe_is_answered(stack: RunningStack, role: str) -> None:
    with grpc.insecure_channel(stack.stack.address_of(role)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICES[role]):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=HANG)
            assert answer.status == SERVING
        with ends_with(grpc.StatusCode.NOT_FOUND):
            health.Check(health_pb2.HealthCheckRequest(service="nobody.Knows"), timeout=HANG)


class Watching:
    """`Watch` in a thread: every status that comes, in order."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._statuses: list[int] = []
        self._changed = threading.Condition()
        request = health_pb2.HealthCheckRequest(service=service)
        self.call = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=HANG)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for answer in self.call:
                with self._changed:
                    self._statuses.append(answer.status)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass

    def wait_for(self, status: int) -> None:
        """Until that is the last that was told."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._statuses[-1:] == [status], HANG), self._statuses

    def end(self) -> None:
        """Nobody listens any more."""
        self.call.cancel()
        self._thread.join(HANG)


def test_probes_see_the_drain_while_streams_go_on(stack: RunningStack) -> None:
    """NOT_SERVING comes first: load balancers must know before calls are refused."""
    plain = {"num_speculative_tokens": 0}
    with (
        own_coordinator(stack.pair, [stack.stack.address_of("target")], drain_timeout=HANG) as own,
        grpc.insecure_channel(own.address) as channel,
    ):
        stream = Recording(own.address, "def main(", {"max_tokens": 400, "ignore_eos": True}, plain)
        watchers = [Watching(channel, name) for name in ("", "paceline.v1.GenerationService")]
        for watcher in watchers:
            watcher.wait_for(SERVING)
        stream.wait_for_tokens(5)
        with stack.standing_target():
            own.supervisor.signal("coordinator", signal.SIGTERM)
            for watcher in watchers:
                watcher.wait_for(NOT_SERVING)
            request = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HANG)
            assert answer.status == NOT_SERVING
            assert not stream.over
        history = stream.result()
        assert history.error is None
        assert len(history.token_ids) == 400
        for watcher in watchers:
            watcher.end()


def test_readiness_follows_the_only_target(stack: RunningStack) -> None:
    """Load balancers remove and add a coordinator by its health."""
    target = contextlib.ExitStack()
    with contextlib.ExitStack() as around:
        around.push(target)
        address = target.enter_context(own_worker("target", stack.pair.target))
        own = around.enter_context(own_coordinator(stack.pair, [address]))
        channel = around.enter_context(grpc.insecure_channel(own.address))
        url = f"http://{own.client.status().coordinator.http_address}/health"
        watchers = [Watching(channel, name) for name in ("", SERVICES["coordinator"])]

        def check_told(status: int, code: int) -> None:
            for watcher in watchers:
                watcher.wait_for(status)
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG)
            assert answer.status == status
            assert httpx2.get(url, timeout=HANG).status_code == code
            assert own.client.status().coordinator.serving is (status == SERVING)

        check_told(SERVING, 200)
        target.close()
        check_told(NOT_SERVING, 503)
        port = int(address.rpartition(":")[2])
        target.enter_context(own_worker("target", stack.pair.target, port=port))
        check_told(SERVING, 200)
        assert own.client.generate("x", {"max_tokens": 2}, timeout=HANG).token_ids
        for watcher in watchers:
            watcher.end()
