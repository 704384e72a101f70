"""The dashboard, the scrape configuration and the page speak of the metrics there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from coordinator.http.metrics import make_registry
from coordinator.recorder import PHASES, Recorder
from paceline.kv import BlockPool
from paceline.telemetry.worker import KINDS, WorkerObserver
from paceline.telemetry.worker_metrics import WorkerCollector
from paceline.v1 import common_pb2

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "observability.md").read_text()
ROW = re.compile(r"^\| `(paceline:\w+)` \| (\w+) \| (.*)\|$", re.MULTILINE)


class Everything:
    """As much of a coordinator as its collector asks for, with something in every family."""

    known_name = "m"

    def __init__(self) -> None:
        class Config:
            model_name = ""
            max_num_speculative_tokens = 4

        class Dispatcher:
            running = waiting = 1

        class Link:
            role, address, load, state = "target", "a:1", 1, None
            known = common_pb2.WorkerInfo(cache=common_pb2.CacheInfo(total_blocks=4, free_blocks=2))

        self.config, self.dispatcher, self.links, self.recorder = Config(), Dispatcher(), [Link()], Recorder()
        self.recorder.failed["INTERNAL"] = 1
        self.recorder.http_calls["GET", "/", "200"] = 1
        self.recorder.grpc_calls["M", "OK"] = 1


def families() -> list[Metric]:
    coordinator: Any = Everything()
    worker = CollectorRegistry()
    worker.register(WorkerCollector("target", "m", WorkerObserver(), BlockPool(4, 4), lambda: 0))
    found = [*make_registry(coordinator).collect(), *worker.collect()]
    return [family for family in found if family.name.startswith("paceline:")]


EXPORTED = {family.name + ("_total" if family.type == "counter" else ""): family for family in families()}
SAMPLES = {sample.name for family in EXPORTED.values() for sample in family.samples}


def expressions(value: Any) -> list[str]:
    """Every query of the dashboard."""
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        return own + [found for each in value.values() for found in expressions(each)]
    return [found for each in value for found in expressions(each)] if isinstance(value, list) else []


def test_every_metric_of_the_dashboard_is_exported() -> None:
    queries = expressions(json.loads((ROOT / "deploy" / "grafana" / "paceline.json").read_text()))
    named = {name for query in queries for name in re.findall(r"paceline:\w+", query)}
    assert len(named) > 20
    assert named <= SAMPLES


def test_every_label_of_the_dashboard_is_one_of_its_metric() -> None:
    queries = expressions(json.loads((ROOT / "deploy" / "grafana" / "paceline.json").read_text()))
    labels = {sample.name: set(sample.labels) for f in EXPORTED.values() for sample in f.samples}
    for query in queries:
        names = re.findall(r"paceline:\w+", query)
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
        for name in names:
            assert grouped - {"position"} <= labels[name], query


def test_the_dashboards_panels_have_places_of_their_own() -> None:
    panels = json.loads((ROOT / "deploy" / "grafana" / "paceline.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_the_page_lists_every_metric_with_its_type_and_no_other() -> None:
    told = {name: kind for name, kind, _ in ROW.findall(PAGE)}
    assert told.keys() == EXPORTED.keys()
    assert {name: told[name] for name in EXPORTED} == {name: family.type for name, family in EXPORTED.items()}


def test_the_page_lists_every_label() -> None:
    rows = {name: rest for name, _, rest in ROW.findall(PAGE)}
    common = {"model_name", "le", "role"}
    for name, family in EXPORTED.items():
        for label in {label for sample in family.samples for label in sample.labels} - common:
            assert f"`{label}`" in rows[name]


@pytest.mark.parametrize("word", [*PHASES, *KINDS])
def test_the_page_explains_every_phase_and_kind(word: str) -> None:
    assert f"`{word}`" in PAGE


def test_the_scrape_configuration_names_the_processes_of_compose() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target.rpartition(":")
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for host, _, port in targets:
        options = services[host]["command"]
        assert f"--http-port={port}" in options or f"--metrics-port={port}" in options
