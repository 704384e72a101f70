"""Rarely used switches of `serve`: reflection on, the prefix cache and HTTP off, on one stack for all."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import RunningStack, sound_stack
from harness.waiting import HANG
from harness.wire import SECRET, channel_with_secret

SERVICES = {
    "coordinator": ("paceline.v1.GenerationService", {"Generate", "Cancel", "Tokenize", "Detokenize"}),
    "target": ("paceline.v1.TargetService", {"GetWorkerInfo", "Verify"}),
    "draft": ("paceline.v1.DraftService", {"GetWorkerInfo", "Draft"}),
}


@pytest.fixture(scope="module")
def switched(pair_paths: Pair) -> Iterator[RunningStack]:
    with sound_stack(pair_paths, reflection=True, prefix_cache=False, http=False) as stack:
        yield stack


@pytest.mark.parametrize("role", SERVICES)
def test_reflection_lists_services_methods_and_messages(switched: RunningStack, role: str) -> None:
    service, methods = SERVICES[role]
    with channel_with_secret(switched.stack.address_of(role)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            service,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        pool = DescriptorPool(database)
        found = pool.FindServiceByName(service)
        assert methods <= {method.name for method in found.methods}
        if role == "coordinator":
            generate = found.FindMethodByName("Generate")
            assert generate.server_streaming
            assert not generate.client_streaming
            assert {"prompt", "resume_from", "received"} <= {
                *(field.name for field in generate.input_type.fields),
                *(oneof.name for oneof in generate.input_type.oneofs),
            }


@pytest.mark.parametrize("role", SERVICES)
def test_every_registered_method_is_answered(switched: RunningStack, role: str) -> None:
    """With a result, or with an error that says what is wrong: none is one that its servicer inherits."""
    address = switched.stack.address_of(role)
    with channel_with_secret(address) as channel, grpc.insecure_channel(address) as plain:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        names = database.get_services()
        methods = [method for name in names for method in pool.FindServiceByName(name).methods]
        codes = {method.full_name: _code_of_an_empty_call(plain, method) for method in methods}
    undone = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL}
    assert {name: code for name, code in codes.items() if code in undone} == {}
    assert {f"grpc.health.v1.Health.{name}" for name in ("Check", "List", "Watch")} <= set(codes)


def _code_of_an_empty_call(channel: grpc.Channel, method: MethodDescriptor) -> grpc.StatusCode:
    """Of one empty message, once the first answer is there."""
    call = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")(
        iter([b""]), timeout=HANG, metadata=SECRET.metadata
    )
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


def test_http_can_be_switched_off(switched: RunningStack) -> None:
    assert switched.stack.http_address in (None, "")
    assert switched.client.status().coordinator.http_address == ""


def test_without_prefix_cache_nothing_is_looked_up(switched: RunningStack, oracle: Oracle) -> None:
    prompt = oracle.encode(SOURCE * 3)[:300]
    for _ in range(2):
        switched.client.generate(prompt, {"max_tokens": 4}, timeout=HANG)
    for role in ("target", "draft"):
        info = switched.worker(role).info
        assert (info.cache.prefix_cache_queries, info.cache.prefix_cache_hits) == (0, 0)
    switched.check_pools_whole()
