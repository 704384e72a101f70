"""A worker's `/metrics`: a port of its own, served by threads of its own."""

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
"""How long a client may send nothing of its request, or take nothing of the answer."""
PATHS: Final = frozenset({"/", "/metrics"})


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
        self,
        role: str,
        model: str,
        observer: WorkerObserver,
        pool: Pool | None,
        sequences: Callable[[], int],
        certificate_days: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`pool` is None where there is no cache. `certificate_days` gives the days that are left of each
        certificate file, by its setting."""
        self._families = Families({"model_name": model, "role": role})
        self._observer = observer
        self._pool = pool
        self._sequences = sequences
        self._certificate_days = certificate_days

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
            "Rows of one pass, of all its sequences; also those of draft tokens that are not committed.",
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
    """The port. It ends with the process, or before."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        """Raises UnavailableError when the port is taken."""
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
        """host:port; known even when the port was a free one."""

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """One scrape failed: most likely its client went away. The library's own prints a traceback."""
        log.debug("a scrape failed", exc_info=True)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    """One connection of one request. Who asks slowly is cut."""

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
        """A scrape is no event."""
