"""The deployment of coordinators: each replica is a coordinator with its own gRPC port on its node.

Clients that reach the nodes use that port. HTTP, and gRPC from outside, come through Serve's proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from coordinator.api import sampling_defaults
from coordinator.api.grpc.auth import warn_if_open
from coordinator.serving import DRAFT_GRACE_SECONDS, Serving
from coordinator.workers.directory.registry import DIRECTORIES
from paceline.core.errors import InternalError
from paceline.core.system import descriptors
from paceline.ray.config import coordinator_config
from paceline.ray.directory import SCHEME, ServeDirectory, left_out
from paceline.ray.proxied import UNARY, ProxiedService
from paceline.ray.scaling import LOAD
from paceline.rpc.server.server import tune_interpreter
from paceline.telemetry.logs import configure_logging

LEFT_OUT_SECONDS = 2.0
"""A replica that gets a new configuration is missing from Serve's lists for a fraction of a second."""


class CoordinatorReplica:
    """A replica with a coordinator. Its workers are the replicas behind two handles."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], targets: Any, drafts: Any = None
    ) -> None:
        """Start a coordinator, and wait until it serves requests.

        `targets` and `drafts` are handles of the workers' deployments. Raises InvalidArgumentError naming
        the field.
        """
        DIRECTORIES[SCHEME] = ServeDirectory
        host = ray.util.get_node_ip_address()
        config = coordinator_config(settings, host, (_place(targets),), (_place(drafts),) if drafts else ())
        configure_logging("coordinator", config.log_format)
        descriptors.raise_limit()
        self._serving = Serving(config)
        self.proxied = ProxiedService(self._serving.service, self._serving.interceptors)
        ready = asyncio.Event()
        self._running = asyncio.create_task(self._serving.run(lambda: warn_if_open(config), ready.set))
        self._running.add_done_callback(lambda _: ready.set())
        if drafts is not None:
            with contextlib.suppress(TimeoutError, RayError):
                async with asyncio.timeout(DRAFT_GRACE_SECONDS):
                    await drafts.ready.remote()
        await ready.wait()
        await self.check_health()
        tune_interpreter()
        self._tasks = [asyncio.create_task(self._leave()), asyncio.create_task(self._know_others())]

    def __serve_build_asgi_app__(self) -> Any:
        """The OpenAI-compatible HTTP API."""
        from coordinator.api.http.app import make_app

        serving = self._serving
        coordinator, defaults = serving.coordinator, sampling_defaults.load(serving.config)
        return without_lifespan(
            make_app(coordinator, serving.template, gate=coordinator.gate, defaults=defaults)
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve tells the routers of it."""
        return {"address": self._serving.server.address}

    async def check_health(self) -> None:
        """Raises InternalError if the coordinator has ended by itself."""
        if self._running.done():
            raise InternalError("the coordinator has ended") from self._running.exception()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests, waiting ones included, for `paceline.ray.scaling`."""
        dispatcher = self._serving.coordinator.dispatcher
        return {LOAD: float(dispatcher.running + dispatcher.waiting)}

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The method of the same name, through Serve's gRPC proxy."""
        async with contextlib.aclosing(
            self.proxied.streaming("Generate", request, grpc_context)
        ) as responses:
            async for response in responses:
                yield response

    async def _leave(self) -> None:
        """Stop as soon as Serve stops this replica, so that long streams end in order and go on elsewhere."""
        context = serve.get_replica_context()
        own = context.app_name, context.deployment
        await left_out(own, context.replica_id.unique_id, LEFT_OUT_SECONDS)
        self._serving.server.request_stop()

    async def _know_others(self) -> None:
        """Tell clients where all coordinators are."""
        context = serve.get_replica_context()
        directory = ServeDirectory("coordinator", f"{context.app_name}/{context.deployment}")
        async for members in directory.watch():
            self._serving.coordinator.coordinators = [member.address for member in members]

    async def __del__(self) -> None:
        """Serve awaits it before it ends the replica."""
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_running"):
            self._serving.server.request_stop()
            await asyncio.wait([self._running])


def _unary(name: str) -> Any:
    async def method(self: CoordinatorReplica, request: Any, grpc_context: Any) -> Any:
        return await self.proxied.unary(name, request, grpc_context)

    method.__name__ = name
    method.__doc__ = "The method of the same name, through Serve's gRPC proxy."
    return method


for _name in UNARY:
    setattr(CoordinatorReplica, _name, _unary(_name))


def _place(handle: Any) -> str:
    return f"{SCHEME}:{handle.app_name}/{handle.deployment_name}"


def without_lifespan(app: Any) -> Any:
    """The application behind Serve, which sends lifespan events: they are answered here."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    return asgi
