"""Dashboard, scrape configuration and page against the exported metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml
from harness import compose
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from coordinator.api.http.metrics import WORKER_ROLES, make_registry
from coordinator.telemetry.metrics import PHASES, Metrics
from coordinator.telemetry.tenants import TenantMetrics
from coordinator.workers.links import LinkState
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

        self.config, self.dispatcher, self.links, self.metrics = Config(), Dispatcher(), [Link()], Metrics()
        self.certificates = SimpleNamespace(days_left=lambda: {"tls_certificate": 1.0})
        self.tenants = TenantMetrics()
        self.tenants.requests["alice", "OK"] = 1
        self.tenants.prompt_tokens["alice"] = self.tenants.generation_tokens["alice"] = 1
        self.metrics.failed["INTERNAL"] = 1
        self.metrics.http_calls["GET", "/", "200"] = 1
        self.metrics.grpc_calls["M", "OK"] = 1


def families() -> list[Metric]:
    coordinator: Any = Everything()
    worker = CollectorRegistry()
    days = coordinator.certificates.days_left
    worker.register(WorkerCollector("target", "m", WorkerObserver(), BlockPool(4, 4), lambda: 0, days))
    found = [*make_registry(coordinator).collect(), *worker.collect()]
    return [family for family in found if family.name.startswith("paceline:")]


EXPORTED = {family.name + ("_total" if family.type == "counter" else ""): family for family in families()}
SAMPLES = {sample.name for family in EXPORTED.values() for sample in family.samples}


VALUES = {
    "role": set(WORKER_ROLES),
    "state": {state.value for state in LinkState},
    "code": {code.name for code in grpc.StatusCode},
}


def expressions(value: Any) -> list[str]:
    """Every query of the dashboard."""
    if isinstance(value, dict):
        named = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        own = [query for query in named if query != "prometheus"]
        return own + [found for each in value.values() for found in expressions(each)]
    return [found for each in value for found in expressions(each)] if isinstance(value, list) else []


DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "paceline.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule["expr"] for rule in RULES]
QUERIES = {"dashboard": expressions(DASHBOARD), "rules": ALERTS}
OF_PROMETHEUS = {"instance", "job"}
"""Labels that it adds to every sample."""
PROMETHEUS_FOLDER = ROOT / "deploy" / "prometheus"
PROMETHEUS: dict[str, dict[str, Any]] = {
    file: yaml.safe_load((PROMETHEUS_FOLDER / file).read_text()) for file in ("prometheus.yml", "secure.yml")
}
SELECTOR = re.compile(r"(paceline:\w+|\bup\b)(?:\{([^}]*)\})?")
PLAIN = re.compile(r"^\w+$")


@pytest.mark.parametrize("where", QUERIES)
def test_every_queried_metric_is_exported(where: str) -> None:
    named = {name for query in QUERIES[where] for name in re.findall(r"paceline:\w+", query)}
    assert len(named) > 8
    assert named <= SAMPLES


@pytest.mark.parametrize("query", [*QUERIES["dashboard"], *QUERIES["rules"]])
def test_every_queried_label_belongs_to_its_metric(query: str) -> None:
    """Whether it selects samples or groups them."""
    labels = {sample.name: set(sample.labels) for f in EXPORTED.values() for sample in f.samples}
    grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
    selectors = SELECTOR.findall(query)
    assert selectors
    for name, selector in selectors:
        known = OF_PROMETHEUS | labels.get(name, set())
        selected = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", selector))
        assert selected <= known
        assert grouped - {"position"} <= known
        for label in known & selected & {"role", "state", "code"}:
            value = re.findall(rf'{label}="(\w+)"', selector)
            assert set(value) <= VALUES[label]


@pytest.mark.parametrize("query", [*QUERIES["dashboard"], *QUERIES["rules"]])
def test_every_query_has_balanced_brackets(query: str) -> None:
    closing, open_ = {")": "(", "]": "[", "}": "{"}, []
    for character in re.sub(r'"[^"]*"', "", query):
        if character in closing.values():
            open_.append(character)
        if character in closing:
            assert open_.pop() == closing[character]
    assert not open_


def test_every_panel_has_a_description_and_unit() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert panels
    for panel in panels:
        assert len(panel["description"]) > 20
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_panel_is_filtered_by_its_process() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {"datasource", "model", "instance", "worker"} == variables
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            names, selectors = zip(*SELECTOR.findall(target["expr"]), strict=True)
            own_port = all(name.startswith("paceline:worker_") for name in names)
            if own_port and "$worker" in target["expr"]:
                continue
            assert all('model_name=~"$model",instance=~"$instance"' in each for each in selectors)


def test_legends_tell_workers_of_one_role_apart() -> None:
    """Drafts of different models are not summed, and each legend names labels that its query leaves."""
    labels = {sample.name: set(sample.labels) for f in EXPORTED.values() for sample in f.samples}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = [set(by.split(", ")) for by in re.findall(r"by \(([^)]*)\)", target["expr"])]
            of_metrics = [OF_PROMETHEUS | labels[name] for name, _ in SELECTOR.findall(target["expr"])]
            assert shown <= set.intersection(*(grouped or of_metrics))
            if "$worker" in target["expr"]:
                assert {"role", "model_name"} <= shown
            elif "worker" in shown:
                assert {"role", "worker_model"} <= shown


def test_the_alerts_are_valid_prometheus_rules() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 8
    for rule in RULES:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert PLAIN.match(rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        # A summary names labels that its expression leaves: those it groups by, or all of its metric's.
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in by.split(", ")}
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        labels = {sample.name: set(sample.labels) for f in EXPORTED.values() for sample in f.samples}
        of_metric = [labels.get(name, set()) for name, _ in SELECTOR.findall(rule["expr"])]
        assert named <= (grouped or OF_PROMETHEUS | set.intersection(*of_metric))


@pytest.mark.parametrize(
    ("days", "severity"), [(31, None), (29, "warning"), (7, "warning"), (6, "critical"), (-1, "critical")]
)
def test_one_alert_fires_for_an_ending_certificate(days: int, severity: str | None) -> None:
    """The expressions compare one metric with numbers, joined by `and`."""
    fires = []
    for rule in RULES:
        parts = [part.split() for part in rule["expr"].split(" and ")]
        if all(part[0] == "paceline:certificate_expiry_days" for part in parts):
            held = [days < int(most) if sign == "<" else days >= int(most) for _, sign, most in parts]
            fires += [rule["labels"]["severity"]] if all(held) else []
    assert fires == ([] if severity is None else [severity])


def test_prometheus_loads_the_alerts() -> None:
    for config in PROMETHEUS.values():
        assert config["rule_files"] == ["rules.yml"]


def test_dashboard_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_the_page_lists_exactly_the_metrics_with_types() -> None:
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


def jobs(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scrape jobs by name, those of other files too."""
    named = [yaml.safe_load((PROMETHEUS_FOLDER / file).read_text()) for file in config["scrape_config_files"]]
    return {job["job_name"]: job for each in (config, *named) for job in each["scrape_configs"]}


def ports_of(config: dict[str, Any]) -> dict[str, int]:
    """Scraped ports by host name."""
    found = {}
    for job in jobs(config).values():
        for group in job.get("static_configs", ()):
            found |= {t.rpartition(":")[0]: int(t.rpartition(":")[2]) for t in group["targets"]}
        for group in job.get("dns_sd_configs", ()):
            assert group["type"] == "A"
            found |= dict.fromkeys(group["names"], group["port"])
    return found


@pytest.mark.parametrize("file", ["prometheus.yml", "secure.yml"])
@pytest.mark.parametrize(
    ("names", "profiles"), [((), ("monitoring", "second-target")), (("coordinator-cpu", "grafana"), ())]
)
def test_prometheus_scrapes_every_process(
    file: str, names: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """Through names that lead to every container of a service, and to those of a second target."""
    project = compose.read()
    started = project.started(*names, profiles=profiles)
    scraped = ports_of(PROMETHEUS[file])
    reached = set()
    for host, port in scraped.items():
        for name in project.behind(host, started):
            given = compose.options(project.services[name])
            assert str(port) in (given.get("http-port"), given.get("metrics-port"))
            reached.add(name)
    assert reached == started - {"prometheus", "grafana"}


def test_the_secure_scrape_differs_in_its_credentials() -> None:
    plain, secure = jobs(PROMETHEUS["prometheus.yml"]), jobs(PROMETHEUS["secure.yml"])
    given = secure["paceline-coordinator"]
    own = {key: given.pop(key) for key in ("scheme", "tls_config", "authorization")}
    assert secure == plain
    rest = ("global", "rule_files", "scrape_config_files")
    assert [PROMETHEUS["secure.yml"][key] for key in rest] == [
        PROMETHEUS["prometheus.yml"][key] for key in rest
    ]
    assert own["scheme"] == "https"
    service = compose.read(compose.MAIN, compose.SECURE).services["prometheus"]
    assert "--config.file=/etc/prometheus/secure.yml" in service["command"]
    assert {own["tls_config"]["ca_file"], own["authorization"]["credentials_file"]} <= compose.mounts(
        service
    ).keys()
    assert own["tls_config"]["server_name"] == "coordinator.paceline.internal"


def test_grafana_finds_data_and_dashboard() -> None:
    project = compose.read()
    places = compose.mounts(project.services["grafana"])
    folder = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((ROOT / places[f"{folder}/datasources/paceline.yml"]).read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((ROOT / places[f"{folder}/dashboards/paceline.yml"]).read_text())[
        "providers"
    ]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert (source["type"], source["isDefault"], host, port) == ("prometheus", True, "prometheus", "9090")
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["prometheus.yml"]["global"]["scrape_interval"]
    (shown,) = [place for place in places if place.startswith(provider["options"]["path"])]
    assert places[shown] == "./deploy/grafana/paceline.json"
    home = project.services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == shown
