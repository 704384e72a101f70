"""The Kubernetes manifests: valid against strict schemas, and wired as the processes expect.

No cluster has run them: what this cannot show is an image that starts and a device plugin that gives GPUs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from harness.parsing import paceline

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/paceline.yaml"
VERSION = "1.37"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))
WORKLOADS = {
    d["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: d
    for d in DOCUMENTS
    if d["kind"] == "Deployment"
}
SERVICES = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if d["kind"] == "Service"}


def container(component: str) -> dict[str, Any]:
    (only,) = WORKLOADS[component]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def settings(component: str) -> dict[str, str]:
    """The `--name=value` options of a component's command."""
    return dict(word.removeprefix("--").split("=", 1) for word in container(component)["args"][1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']} {d['metadata']['name']}")
def test_a_document_is_valid(document: dict[str, Any]) -> None:
    assert kubernetes_validate.validate(document, VERSION, strict=True) == VERSION


@pytest.mark.planted
def test_a_misspelt_field_is_noticed() -> None:
    document = copy.deepcopy(WORKLOADS["target"])
    pod = document["spec"]["template"]["spec"]
    pod["enableServiceLink"] = pod.pop("enableServiceLinks")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("component", ["coordinator", "target", "draft"])
def test_a_component_is_wired(component: str) -> None:
    spec, own = WORKLOADS[component]["spec"], container(component)
    pod, given = spec["template"]["spec"], settings(component)
    paceline(own["args"])
    named = {port["name"]: port["containerPort"] for port in own["ports"]}
    assert str(named["grpc"]) == given["port"]
    assert given["host"] == "0.0.0.0"
    for other in ("http", "metrics"):
        assert str(named.get(other, "")) == given.get(f"{other}-port", "")
    for probe in ("startupProbe", "readinessProbe"):
        assert own[probe]["grpc"]["port"] == named["grpc"]
    assert pod["enableServiceLinks"] is False
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    # Variables in a command are those of the container.
    variables = {entry["name"] for entry in own["env"]}
    for value in given.values():
        if value.startswith("$("):
            assert value[2:-1] in variables


def test_coordinators_find_workers_by_name() -> None:
    given = settings("coordinator")
    for role in ("target", "draft"):
        service = SERVICES[f"paceline-{role}"]
        assert service["clusterIP"] == "None"
        (port,) = service["ports"]
        assert given[role] == f"dns:paceline-{role}:{port['port']}"
        assert str(port["port"]) == settings(role)["port"]
        assert service["selector"] == WORKLOADS[role]["spec"]["selector"]["matchLabels"]
        assert container(role)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert SERVICES["paceline"]["selector"] == WORKLOADS["coordinator"]["spec"]["selector"]["matchLabels"]
    assert {port["port"] for port in SERVICES["paceline"]["ports"]} == {50151, 8000}


def test_a_coordinator_has_time_to_drain() -> None:
    pod = WORKLOADS["coordinator"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= int(settings("coordinator")["drain-timeout"]) + 5
