"""The process of one worker: load, start the engine thread, serve, announce, drain.

Draft and target worker differ in their engine and in the service they register; everything around that
is here, once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from paceline.core import limits
from paceline.core.config import WorkerConfig
from paceline.core.errors import InternalError
from paceline.engine.build import Built, build
from paceline.engine.loop import Engine, EngineThread
from paceline.rpc.codec import PROTOCOL_VERSION
from paceline.rpc.server import Server, configure_logging, tune_interpreter
from paceline.rpc.worker import ask, watch_progress
from paceline.v1 import common_pb2

log = logging.getLogger(__name__)


class Holder(Engine[Any, Any], Protocol):
    """An engine that holds sequences."""

    @property
    def holdings(self) -> Any:
        """Its sequences."""


@dataclass(frozen=True, slots=True)
class Role:
    """What makes a worker a draft or a target worker."""

    name: str
    service: str
    """Full name of the gRPC service, for health checks."""
    make_engine: Callable[[Built, WorkerConfig], Holder]
    register: Callable[[WorkerShell, grpc.aio.Server], None]


class WorkerShell:
    """The loaded model with its engine thread, as the service sees it."""

    def __init__(self, role: Role, config: WorkerConfig) -> None:
        self._role = role
        self._config = config
        self._instance_id = uuid.uuid4().hex
        self.stopping = asyncio.Event()
        """Set when streams are to end."""
        self._built = build(config)
        self._engine = role.make_engine(self._built, config)
        self.thread: EngineThread[Any, Any] = EngineThread(self._engine, f"{role.name}-engine")

    async def hand_over(self, _seconds: float) -> None:
        """What runs here can run elsewhere: end the streams, so that it does."""
        self.stopping.set()

    async def info(self) -> common_pb2.WorkerInfo:
        """What this worker is and has; the cache's numbers are read between two steps."""
        built, config = self._built, self._config
        info = common_pb2.WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            role=self._role.name,
            model=config.model,
            process_id=os.getpid(),
            instance_id=self._instance_id,
            vocabulary_size=built.loaded.vocab_size,
            tokenizer_fingerprint=built.loaded.fingerprint,
            eos_token_ids=sorted(built.loaded.eos_token_ids),
            max_model_len=built.max_model_len,
            max_speculative_tokens=limits.MAX_SPECULATIVE_TOKENS,
            device=str(built.runner.device),
            dtype=str(built.runner.dtype).removeprefix("torch."),
            num_parameters=built.num_parameters,
        )
        info.cache.CopyFrom(await ask(self.thread, self._cache_info))
        return info

    def _cache_info(self) -> common_pb2.CacheInfo:
        pool = self._built.runner.cache.pool
        pool.check_integrity()
        return common_pb2.CacheInfo(
            block_size=pool.block_size,
            total_blocks=pool.num_blocks,
            free_blocks=pool.free_blocks,
            sequences=len(self._engine.holdings),
        )


async def _serve(role: Role, config: WorkerConfig) -> None:
    shell = WorkerShell(role, config)
    server = Server(role.name, config.host, config.port)
    role.register(shell, server.grpc)
    if config.reflection:
        server.reflect(role.service)
    loop = asyncio.get_running_loop()
    shell.thread.on_death = lambda: _call_from_thread(loop, server.abandon)
    shell.thread.start()
    await server.start()
    await server.set_serving(True, [role.service])
    watcher = asyncio.create_task(
        watch_progress(shell.thread, lambda serving: server.set_serving(serving, [role.service]))
    )
    server.heed_signals(exit_with_parent=config.exit_with_parent)
    tune_interpreter()
    server.announce()
    log.info("%s worker listens on %s", role.name, server.address)
    try:
        await server.run_until_stopped(exit_with_parent=config.exit_with_parent, drain=shell.hand_over)
    finally:
        watcher.cancel()
        shell.thread.stop()
    if server.abandoned:
        # A worker without its engine thread can only be restarted: the exit code says that it failed.
        raise InternalError("the engine thread died")


def _call_from_thread(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(callback)


def run(role: Role, config: WorkerConfig) -> None:
    """Serve until told to stop. Raises PacelineError when the worker cannot start."""
    configure_logging(role.name)
    asyncio.run(_serve(role, config))
