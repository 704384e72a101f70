"""A worker's `/metrics`: a port of its own, served by a thread of prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline.core.errors import UnavailableError
from paceline.telemetry.exposition import Families
from paceline.telemetry.worker import WorkerObserver


class Pool(Protocol):
    """The blocks of a cache."""

    @property
    def num_blocks(self) -> int:
        """All of them."""

    @property
    def free_blocks(self) -> int:
        """Those that nobody has."""


class WorkerCollector(Collector):
    """Reads the engine's numbers when it is asked, from another thread than the one that writes them."""

    def __init__(
        self, role: str, model: str, observer: WorkerObserver, pool: Pool, sequences: Callable[[], int]
    ) -> None:
        self._families = Families({"model_name": model, "role": role})
        self._observer = observer
        self._pool = pool
        self._sequences = sequences

    def collect(self) -> Iterator[Metric]:
        """Passes, and what is held now."""
        make, passes = self._families, self._observer.passes.items()
        yield make.histogram(
            "worker_pass_time_seconds",
            "Time of one pass of the model.",
            [([kind], each.seconds) for kind, each in passes],
            ["kind"],
        )
        yield make.histogram(
            "worker_pass_rows",
            "Rows of one pass, of all its sequences.",
            [([kind], each.rows) for kind, each in passes],
            ["kind"],
        )
        yield make.histogram(
            "worker_pass_sequences",
            "Sequences that shared one pass.",
            [([kind], each.sequences) for kind, each in passes],
            ["kind"],
        )
        free = self._pool.free_blocks
        yield make.gauge(
            "worker_kv_cache_blocks",
            "Blocks of the KV cache.",
            [(["used"], self._pool.num_blocks - free), (["free"], free)],
            ["state"],
        )
        yield make.gauge(
            "worker_sequences_held", "Sequences that hold state here.", [((), self._sequences())]
        )


class MetricsServer:
    """The port. It ends with the process, or before."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        """Raises UnavailableError when the port is taken."""
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            started: tuple[WSGIServer, Any] = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {host}:{port} for metrics") from error
        self._server: WSGIServer = started[0]
        self._thread: Thread = started[1]
        self.address = f"{host}:{self._server.server_port}"
        """host:port; known even when the port was a free one."""

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
