"""The deployments of workers: each replica runs an ordinary worker as its child."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, ClassVar

import grpc
import ray
from grpc_health.v1 import health_pb2

from coordinator.workers.stream_protocol import PROTOCOLS
from paceline.core.config import WorkerConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.secret import read_secret
from paceline.core.security.tls import Tls
from paceline.ray.child import Child
from paceline.ray.config import worker_config
from paceline.ray.scaling import CACHE_USE, LOAD
from paceline.rpc.security.auth import PeerRole
from paceline.rpc.security.credentials import open_aio_channel
from paceline.rpc.server.server import CHANNEL_OPTIONS
from paceline.supervisor.arguments import arguments
from paceline.supervisor.children import STOP_MARGIN
from paceline.supervisor.stack import PROGRAM

ANSWER_SECONDS = 5.0
"""Time limit for a worker's answer about its health or its load."""

_HEALTH = "/grpc.health.v1.Health/Check"


class Worker:
    """A replica with a worker. Its coordinators talk to the worker itself, at the node's address."""

    role: ClassVar[str]

    def __init__(self, settings: dict[str, Any]) -> None:
        """Start the worker and wait until it serves. Raises RuntimeError with its last words."""
        config = worker_config(self.role, settings, ray.util.get_node_ip_address())
        config = for_resources(config, ray.get_runtime_context().get_assigned_resources())
        command = (*PROGRAM, f"{self.role}-worker", *arguments(config))
        self._child = Child(self.role, command)
        self._stop_seconds = config.handover_timeout + STOP_MARGIN
        self._is_open = config.tls is None
        address = self._child.wait_for_address()
        secret = read_secret(config.worker_secret_file)
        self._metadata = () if secret is None else secret.metadata
        self._channel = open_aio_channel(address, CHANNEL_OPTIONS, _as_client(config.tls, self.role))

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve tells the coordinators of it."""
        return {"address": self._child.address, "pid": self._child.pid}

    async def ready(self) -> None:
        """Answers a handle, which can only reach a replica that is ready."""

    async def check_health(self) -> None:
        """Raises RuntimeError unless the worker answers and its engine makes progress."""
        if not self._child.running:
            raise RuntimeError(f"{self.role} worker: {self._child.last_words()}")
        ask = self._channel.unary_unary(
            _HEALTH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await ask(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(f"{self.role} worker: does not answer: {error.code().name}") from None
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise RuntimeError(f"{self.role} worker: its engine makes no progress")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Load and use of the cache, for `paceline.ray.scaling`.

        With TLS a worker tells coordinators alone, so there are none.
        """
        if not self._is_open:
            return {}
        info = await PROTOCOLS[self.role].info(self._channel, ANSWER_SECONDS, self._metadata)
        cache = info.cache
        used = (cache.total_blocks - cache.free_blocks) / cache.total_blocks if cache.total_blocks else 0.0
        return {LOAD: float(cache.sequences), CACHE_USE: used}

    async def __del__(self) -> None:
        """Serve awaits it before it ends the replica: the worker drains."""
        if hasattr(self, "_channel"):
            await self._channel.close()
            await asyncio.to_thread(self._child.stop, self._stop_seconds)


class TargetWorker(Worker):
    """A replica with a target worker."""

    role = "target"


class DraftWorker(Worker):
    """A replica with a draft worker."""

    role = "draft"


def for_resources(config: WorkerConfig, assigned: dict[str, Any]) -> WorkerConfig:
    """The configuration for what Ray has assigned to this replica.

    A replica without GPUs may still see all of them, so it is told to use none. Raises InvalidArgumentError
    naming `device` if it must have one.
    """
    if assigned.get("GPU"):
        return config
    if config.device not in ("auto", "cpu"):
        raise InvalidArgumentError("device", f"{config.device} requires num_gpus in ray_actor_options")
    return replace(config, device="cpu")


def _as_client(tls: Tls | None, role: str) -> Tls | None:
    """The worker's own identity, to ask it from this side."""
    return None if tls is None else replace(tls, server_name=PeerRole(role).dns_name)
