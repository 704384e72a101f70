"""Runs a worker process: load, start the engine thread, serve, announce, drain.

Draft and target workers differ only in their engine and the registered service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import grpc

from paceline.core import limits
from paceline.core.clock import monotonic
from paceline.core.config import MODEL_DRAFTER, NO_SUB_DRAFTER, DraftConfig, WorkerConfig
from paceline.core.errors import InternalError
from paceline.core.security.secret import WorkerSecret, read_secret
from paceline.core.system.exit import leave
from paceline.engine.loading.build import Built
from paceline.engine.loading.model import take_over_library_logs
from paceline.engine.scheduling.engine_thread import Engine, EngineThread
from paceline.engine.scheduling.mask import tokenizer_of
from paceline.engine.scheduling.sequences import HeldSequences
from paceline.grammar import Grammars
from paceline.grammar.checks import StructureChecks
from paceline.grammar.process import CompileProcess
from paceline.kv import BlockPool
from paceline.rpc.codec import PROTOCOL_VERSION
from paceline.rpc.security.certificate_expiry import CertificateExpiry
from paceline.rpc.security.credentials import check_files, is_loopback
from paceline.rpc.server import event_loop
from paceline.rpc.server.parent_watch import leave_with_parent
from paceline.rpc.server.server import Server, host_in_address, tune_interpreter
from paceline.rpc.streams.structures import StructureGuard
from paceline.rpc.streams.unix_stream import LocalServer
from paceline.rpc.streams.worker_stream import FrameCodec, ask, watch_progress
from paceline.telemetry.logs import configure_logging, fields
from paceline.telemetry.span_interface import Spans
from paceline.telemetry.tracing import make_spans
from paceline.telemetry.worker import WorkerObserver
from paceline.v1 import admin_pb2_grpc, common_pb2
from paceline.worker_admin import HandedOver, WorkerAdminService
from paceline.worker_join import Identity, Joining, advertised

if TYPE_CHECKING:
    from paceline.telemetry.worker_metrics import MetricsServer

log = logging.getLogger(__name__)

_MIXED_PREFILL_ON_CPU = 16
CHECK_SECONDS = 1.0
"""Minimum interval between integrity checks of the cache. A check runs if the cache's counters are requested
while no sequence is held, because it blocks passes."""
_HAND_OVER_CHECK_SECONDS = 0.02
_STOP_SECONDS = 5.0
"""Time limit for the engine's last step. It is shorter than a supervisor's limit for the process."""

ConfigT = TypeVar("ConfigT", bound=WorkerConfig)


class Holder(Engine[Any, Any], Protocol):
    """An engine that holds sequences and reports to an observer."""

    observer: WorkerObserver
    grammars: Grammars | None

    @property
    def sequences(self) -> HeldSequences[Any]:
        """The held sequences."""

    @property
    def max_tree_nodes(self) -> int:
        """Nodes of the largest draft tree that it proposes or verifies; 0 for chains only."""


@dataclass(frozen=True, slots=True)
class Role(Generic[ConfigT]):
    """The differences between draft and target workers."""

    name: str
    answers: str
    """Name of the span for this worker's part of a round."""
    service: str
    """Full name of the gRPC service, for health checks."""
    load: Callable[[ConfigT], Built]
    """Loads the parts of the engine, and makes their device current in the calling thread."""
    make_engine: Callable[[Built, ConfigT, WorkerObserver], Holder]
    """Builds the engine. Its parts keep references into the observer, which must not be replaced later."""
    register: Callable[[WorkerShell, grpc.aio.Server], None]
    frame_codec: FrameCodec
    """Codec of the frames on the worker's stream."""


class WorkerShell:
    """The loaded model and its engine thread, as the gRPC service uses them."""

    def __init__(self, role: Role[ConfigT], config: ConfigT, spans: Spans | None = None) -> None:
        self._role = role
        self._config = config
        self.instance_id = uuid.uuid4().hex
        """Distinguishes this process from its predecessor and successor."""
        self.stopping = asyncio.Event()
        """Set when streams must end."""
        self.draining = asyncio.Event()
        """Set when this worker begins to stop: no coordinator shall choose it any more."""
        self.handed_over = HandedOver()
        """Known once `stopping` is set."""
        self._built = role.load(config)
        chosen = _for_device(config, self._built.device.type)
        self._engine = role.make_engine(self._built, chosen, WorkerObserver(role.answers, spans))
        self._checked_at = -math.inf
        self.certificates = CertificateExpiry({"tls": config.tls})
        self._local: LocalServer | None = None
        self.thread: EngineThread[Any, Any] = EngineThread(self._engine, f"{role.name}-engine")
        checks = StructureChecks(CompileProcess(lambda: tokenizer_of(self._built.loaded)))
        self.guard = StructureGuard(self.thread, checks, self._engine.grammars)
        """The engine thread's interface for streams."""

    async def hand_over(self) -> None:
        """Give coordinators time to move their sequences to other workers, then end the streams.

        They know from the health service that this worker is stopping.
        """
        self.draining.set()
        held = len(self._engine.sequences)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.handover_timeout):
                while len(self._engine.sequences):  # noqa: ASYNC110 - closed by the engine thread
                    await asyncio.sleep(_HAND_OVER_CHECK_SECONDS)
        self.handed_over = HandedOver(held, len(self._engine.sequences))
        self.stopping.set()
        self.stop_locally()

    @contextlib.contextmanager
    def served_locally(self) -> Iterator[None]:
        """Also serve the local socket, if configured. Raises UnavailableError naming it."""
        path = self._config.local_socket
        if path:
            server = LocalServer(path, self.instance_id, self.guard, self._role.frame_codec)
            server.start()
            self._local = server
        try:
            yield
        finally:
            self.stop_locally()

    def stop_locally(self) -> None:
        """End the streams of the local socket and remove it."""
        if self._local is not None:
            self._local.stop()
            self._local = None

    async def info(self) -> common_pb2.WorkerInfo:
        """Description of this worker; the cache's counters are read between two engine steps."""
        built, config = self._built, self._config
        info = common_pb2.WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            role=self._role.name,
            model=config.model,
            process_id=os.getpid(),
            instance_id=self.instance_id,
            vocabulary_size=built.loaded.vocab_size,
            tokenizer_fingerprint=built.loaded.fingerprint,
            eos_token_ids=sorted(built.loaded.eos_token_ids),
            max_model_len=built.max_model_len,
            max_speculative_tokens=limits.MAX_SPECULATIVE_TOKENS,
            device=str(built.device),
            dtype=str(built.dtype).removeprefix("torch."),
            num_parameters=built.num_parameters,
            weight_bytes=built.weight_bytes,
            local_socket=self._local.path if self._local is not None else "",
            model_fingerprint=built.model_fingerprint,
            max_tree_nodes=self._engine.max_tree_nodes,
            **_of_draft(config),
        )
        if (plan := built.memory_plan) is not None:
            parts = {"weights": plan.weights, "cache": plan.cache, "recordings": plan.graphs}
            info.memory.CopyFrom(common_pb2.MemoryInfo(total=plan.total, passes=plan.passes, **parts))
        info.cache.CopyFrom(await ask(self.thread, self._cache_info))
        return info

    def serve_metrics(self) -> MetricsServer | None:
        """Serve `/metrics`, if configured. Raises UnavailableError if the port is in use."""
        config = self._config
        if config.metrics_port is None:
            return None
        from paceline.telemetry.worker_metrics import MetricsServer, WorkerCollector

        collector = WorkerCollector(
            self._role.name,
            _drafter(config) or config.model,
            self._engine.observer,
            self._built.pool,
            self._sequences,
            self.certificates.days_left,
        )
        return MetricsServer(collector, host_in_address(config.host), config.metrics_port)

    def _sequences(self) -> int:
        return len(self._engine.sequences)

    def _cache_info(self) -> common_pb2.CacheInfo:
        """Raises InternalError if the cache's bookkeeping is damaged."""
        pool, sequences, now = self._built.pool, self._engine.sequences, monotonic()
        if pool is not None and not len(sequences) and now - self._checked_at >= CHECK_SECONDS:
            check_cache(pool, sequences)
            self._checked_at = now
        return cache_info(pool, sequences)


def check_cache(pool: BlockPool, sequences: HeldSequences[Any]) -> None:
    """Check every block. Raises InternalError if the cache's bookkeeping is damaged."""
    pool.check_integrity()
    if sequences.prefix_index is not None:
        sequences.prefix_index.check_integrity()


def cache_info(pool: BlockPool | None, sequences: HeldSequences[Any]) -> common_pb2.CacheInfo:
    """Read the counters of a worker's cache in O(1); without a cache, it has zero blocks."""
    if pool is None:
        return common_pb2.CacheInfo(sequences=len(sequences))
    index = sequences.prefix_index
    return common_pb2.CacheInfo(
        block_size=pool.block_size,
        total_blocks=pool.num_blocks,
        free_blocks=pool.free_blocks,
        cached_blocks=pool.cached_blocks,
        sequences=len(sequences),
        prefix_cache_queries=index.queries if index is not None else 0,
        prefix_cache_hits=index.hits if index is not None else 0,
        num_preemptions=sequences.num_preemptions,
    )


def _of_draft(config: WorkerConfig) -> dict[str, Any]:
    """Fields of a draft's description."""
    if not isinstance(config, DraftConfig):
        return {}
    guessing = config.sub_drafter != NO_SUB_DRAFTER
    return {
        "lookahead_branches": config.lookahead_branches,
        "sub_drafter": config.sub_drafter if guessing else "",
        "drafter": _drafter(config),
    }


def _drafter(config: WorkerConfig) -> str:
    """What proposes in place of a model; empty with one."""
    if not isinstance(config, DraftConfig) or config.drafter == MODEL_DRAFTER:
        return ""
    return config.drafter


def _for_device(config: ConfigT, device: str) -> ConfigT:
    """Fill in defaults that depend on the device.

    On a CPU, the time of a pass grows with every row; on a GPU, hundreds of rows cost little more than one.
    """
    chosen = config.max_mixed_prefill_tokens or (_MIXED_PREFILL_ON_CPU if device == "cpu" else 0)
    return replace(config, max_mixed_prefill_tokens=chosen)


async def _serve(role: Role[ConfigT], config: ConfigT) -> None:
    loaded = threading.Event()
    if config.exit_with_parent:
        leave_with_parent(unless=loaded)
    secret = read_secret(config.worker_secret_file)
    if config.tls is not None:
        check_files(config.tls)  # before loading a model, which may take minutes
    elif not is_loopback(config.host):
        risk = "can use this worker" if secret is None else "may be able to read all traffic and the secret"
        log.warning("listening on %s without TLS: anyone on the network %s", config.host, risk)
    spans = make_spans(role.name, config.otlp_traces_endpoint)
    shell = WorkerShell(role, config, spans)
    server = Server(role.name, config.host, config.port, tls=config.tls, secret=secret)
    role.register(shell, server.grpc)
    _take_orders(shell, server, guarded=secret is not None or config.tls is not None)
    if config.reflection:
        server.reflect(role.service)
    loop = asyncio.get_running_loop()
    shell.thread.on_death = lambda: _call_from_thread(loop, server.abandon)
    shell.thread.start()
    with shell.served_locally():
        await server.start()
        await server.set_serving(True, [role.service])
        tasks = [
            asyncio.create_task(_join(role.name, config, shell, server, secret)),
            asyncio.create_task(shell.certificates.watch()),
            asyncio.create_task(
                watch_progress(shell.thread, lambda serving: server.set_serving(serving, [role.service]))
            ),
        ]
        metrics = shell.serve_metrics()
        server.heed_signals(exit_with_parent=config.exit_with_parent)
        loaded.set()
        tune_interpreter()
        server.announce(**({} if metrics is None else {"metrics_address": metrics.address}))
        log.info("%s worker listening on %s", role.name, server.address)
        if metrics is not None:
            log.info("serving metrics on %s", metrics.address, extra=fields(metrics_address=metrics.address))
        try:
            await server.run_until_stopped(drain=shell.hand_over)
        finally:
            for task in tasks:
                task.cancel()
            shell.guard.close()
            shell.stop_locally()  # before the engine thread ends, which answers these streams
            if not shell.thread.stop(_STOP_SECONDS):
                _leave_the_engine()
            if metrics is not None:
                metrics.stop()
            if spans is not None:
                await asyncio.to_thread(spans.close)
    if server.abandoned:
        # Without the engine thread the process must be restarted, so its exit code must report a failure.
        raise InternalError("the engine thread died")


async def _join(
    role: str, config: WorkerConfig, shell: WorkerShell, server: Server, secret: WorkerSecret | None
) -> None:
    """Stay a member of the coordinators until this worker begins to stop."""
    address = advertised(config.advertise, config.host, server.address)
    identity = Identity(role, address, shell.instance_id)
    joining = asyncio.create_task(Joining(config.join, identity, config.tls, secret).run())
    try:
        await shell.draining.wait()
    finally:
        joining.cancel()


def _take_orders(shell: WorkerShell, server: Server, *, guarded: bool) -> None:
    async def drain() -> HandedOver:
        server.request_stop()
        await shell.stopping.wait()
        return shell.handed_over

    admin = WorkerAdminService(shell.thread, drain, guarded=guarded)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server.grpc)


def _leave_the_engine() -> NoReturn:
    """Exit although the engine thread is stuck.

    Without a supervisor nothing else would end the process, and it would keep its device memory.
    """
    log.error("the engine thread does not end; exiting without it")
    leave(1)


def _call_from_thread(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(callback)


def run(role: Role[ConfigT], config: ConfigT) -> None:
    """Serve until stopped. Raises PacelineError if the worker cannot start."""
    configure_logging(role.name, config.log_format, named_by_parent=config.exit_with_parent)
    take_over_library_logs(quiet=config.log_format == "json")
    event_loop.run(_serve(role, config))
