"""A worker's `/metrics` endpoint, on a separate port with its own threads."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline.core.errors import UnavailableError
from paceline.telemetry.exposition import Families, encoder
from paceline.telemetry.worker import WorkerObserver

log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0
"""Longest time without progress in reading a request or sending the answer."""
PATHS: Final = frozenset({"/", "/metrics"})


class Pool(Protocol):
    """The blocks of a cache."""

    @property
    def num_blocks(self) -> int:
        """Total number of blocks."""

    @property
    def free_blocks(self) -> int:
        """Number of unowned blocks."""


class WorkerCollector(Collector):
    """Reads the engine's numbers on each scrape, in a different thread than the engine's."""

    def __init__(
        self,
        role: str,
        model: str,
        observer: WorkerObserver,
        pool: Pool | None,
        sequences: Callable[[], int],
        certificate_days: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`pool` is None without a cache. `certificate_days` returns the remaining days of each certificate
        file, by setting."""
        self._families = Families({"model_name": model, "role": role})
        self._observer = observer
        self._pool = pool
        self._sequences = sequences
        self._certificate_days = certificate_days

    def collect(self) -> Iterator[Metric]:
        """Histograms of passes, and the current state."""
        make, passes = self._families, self._observer.passes.items()
        yield make.histogram(
            "worker_pass_time_seconds",
            "Time of one pass of the model.",
            [([kind], each.seconds) for kind, each in passes],
            ["kind"],
        )
        yield make.histogram(
            "worker_pass_rows",
            "Rows of one pass over all its sequences, including rows of draft tokens that are not committed.",
            [([kind], each.rows) for kind, each in passes],
            ["kind"],
        )
        yield make.histogram(
            "worker_pass_sequences",
            "Sequences that shared one pass.",
            [([kind], each.sequences) for kind, each in passes],
            ["kind"],
        )
        if self._pool is not None:
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
        yield make.certificate_expiry(self._certificate_days())


class MetricsServer:
    """The HTTP server of `/metrics`."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        """Raises UnavailableError if the port is in use."""
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        address = host.strip("[]")
        kind = _ServerOfIPv6 if ":" in address else _Server
        try:
            self._server = kind((address, port), partial(_Handler, registry))
        except OSError as error:
            raise UnavailableError(f"cannot listen on {host}:{port} for metrics") from error
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"
        """host:port, with the actual port."""

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed scrape, usually a disconnected client; the default prints a traceback."""
        log.debug("a scrape failed", exc_info=True)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    """One connection with one request. Slow clients are disconnected."""

    timeout = REQUEST_SECONDS

    def __init__(self, registry: CollectorRegistry, *args: Any) -> None:
        self._registry = registry
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in PATHS:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        encode, content_type = encoder(self.headers.get("accept", ""))
        body = encode(self._registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "paceline"

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""
