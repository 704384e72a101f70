"""Metrics and spans of a worker."""

from __future__ import annotations

import re
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.errors import InvalidArgumentError, UnavailableError
from paceline.kv import BlockPool
from paceline.telemetry.traceparent import TraceParent, round_span_id
from paceline.telemetry.tracing import make_spans
from paceline.telemetry.worker import WorkerObserver
from paceline.telemetry.worker_metrics import MetricsServer, WorkerCollector

ROOT = Path(__file__).parents[3]
PACKAGES = ("paceline", "coordinator", "draft_worker", "target_worker")


@dataclass
class FakeSpans:
    made: list[tuple[Any, ...]] = field(default_factory=list)

    def begin(self, name: str, parent: Any, began: float) -> None:
        raise AssertionError("a worker begins no request")

    def record(self, *args: Any, **named: Any) -> None:
        self.made.append((*args, named))

    def close(self) -> None:
        pass


def test_an_answers_span_is_below_its_rounds() -> None:
    spans = FakeSpans()
    observer, parent = WorkerObserver("verify", spans), TraceParent(5, 7, True)
    observer.answered(str(parent), "s", 3, 1.0, 2.0, {"more": 4}, "INTERNAL")
    ((name, below, began, ended, attributes, named),) = spans.made
    assert (name, began, ended, named) == ("verify", 1.0, 2.0, {"error": "INTERNAL"})
    assert below == TraceParent(5, round_span_id(parent, "s", 3), True)
    assert attributes == {"paceline.sequence_id": "s", "paceline.round": 3, "more": 4}


@pytest.mark.parametrize("traceparent", ["", "nonsense", str(TraceParent(5, 7, False))])
def test_an_untraced_answer_makes_no_span(traceparent: str) -> None:
    spans = FakeSpans()
    WorkerObserver("verify", spans).answered(traceparent, "s", 1, 0.0, 1.0, {})
    assert spans.made == []


def test_a_worker_without_tracing_ignores_sampling() -> None:
    WorkerObserver("verify").answered(str(TraceParent(5, 7, True)), "s", 1, 0.0, 1.0, {})


def collector(observer: WorkerObserver | None = None, pool: BlockPool | None = None) -> WorkerCollector:
    """A target's, which holds two sequences."""
    return WorkerCollector("target", "m", observer or WorkerObserver(), pool, lambda: 2)


def test_metrics_show_passes_and_held_blocks() -> None:
    observer, pool = WorkerObserver(), BlockPool(8, 16)
    pool.allocate()
    observer.passes["rounds"].ran(rows=10, sequences=2, seconds=0.004)
    observer.passes["ahead"].ran(rows=3, sequences=1, seconds=0.001)
    server = MetricsServer(collector(observer, pool), "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            lines = set(answer.read().decode().splitlines())
        with pytest.raises(UnavailableError, match=server.address):
            MetricsServer(collector(), "127.0.0.1", int(server.address.rpartition(":")[2]))
    finally:
        server.stop()
    common = 'model_name="m",role="target"'
    for line in (
        f'pass_rows_sum{{kind="rounds",{common}}} 10.0',
        f'pass_sequences_sum{{kind="rounds",{common}}} 2.0',
        f'pass_time_seconds_count{{kind="ahead",{common}}} 1.0',
        f'kv_cache_blocks{{{common},state="used"}} 1.0',
        f'kv_cache_blocks{{{common},state="free"}} 7.0',
        f"sequences_held{{{common}}} 2.0",
    ):
        assert f"paceline:worker_{line}" in lines


def test_a_worker_without_a_cache_has_no_block_metrics() -> None:
    names = {metric.name for metric in collector().collect()}
    assert "paceline:worker_sequences_held" in names
    assert not any("kv_cache" in name for name in names)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(collector(pool=BlockPool(8, 4)), "127.0.0.1", 0)
    yield made
    made.stop()


@pytest.fixture
def metrics_url(server: MetricsServer) -> str:
    return f"http://{server.address}"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0;escaping=underscores", "application/openmetrics-text"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=mine", "text/plain"),
    ],
)
def test_metric_names_are_the_same_in_every_format(metrics_url: str, accept: str, kind: str) -> None:
    """The library's escaping for OpenMetrics makes `paceline_worker…` of the samples' names."""
    request = urllib.request.Request(f"{metrics_url}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith(kind)
        lines = answer.read().decode().splitlines()
    assert 'paceline:worker_sequences_held{model_name="m",role="target"} 2.0' in lines
    assert (lines[-1] == "# EOF") == (kind == "application/openmetrics-text")


def test_a_workers_metrics_reveal_no_request(metrics_url: str) -> None:
    """The port has no key: labels are names of the model and of kinds only."""
    with urllib.request.urlopen(metrics_url, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels == {"model_name", "role", "kind", "state", "le"}, "and `setting` with certificates"


def test_other_paths_of_a_workers_port_are_not_found(metrics_url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(f"{metrics_url}/nothing", timeout=60)
    assert failure.value.code == 404
    failure.value.close()


def test_a_disconnecting_client_causes_no_traceback(
    server: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "paceline.telemetry.worker_metrics")
    failed, handle_error = threading.Event(), server._server.handle_error

    def handled(*of: Any) -> None:
        handle_error(*of)
        failed.set()

    server._server.handle_error = handled
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
        client.sendall(b"GET /metr")
    assert failed.wait(60)
    server.stop()
    assert capsys.readouterr().err == ""
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_opentelemetry_is_loaded_only_when_enabled() -> None:
    """One module imports it, and that one is imported within functions only."""
    loads = re.compile(
        r"^(from|import) (opentelemetry|paceline\.telemetry\.spans|paceline\.telemetry import spans)", re.M
    )
    product = (file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    assert {file.name for file in product if loads.search(file.read_text())} == {"spans.py"}
    assert make_spans("target", "") is None


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paceline.telemetry.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidArgumentError, match=r"otlp_traces_endpoint: .*paceline\[otel\]"):
        make_spans("target", "http://127.0.0.1:4317")
