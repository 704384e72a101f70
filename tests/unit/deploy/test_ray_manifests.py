"""The manifests for Ray: wired as Serve, KubeRay and our builder expect.

The first one runs in tests/ray. No cluster has run the second one. No package has a schema for it: with
PACELINE_RAYSERVICE_SCHEMA, a file with the JSON schema of KubeRay's RayService, it is held to that as well.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from paceline.ray.config import AppArgs

FOLDER = Path(__file__).parents[3] / "deploy/ray"
SERVE: dict[str, Any] = yaml.safe_load((FOLDER / "paceline.yaml").read_text())
RAYSERVICE, GRPC_SERVICE = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
SPEC = RAYSERVICE["spec"]
INNER: dict[str, Any] = yaml.safe_load(SPEC["serveConfigV2"])
SCHEMA = os.environ.get("PACELINE_RAYSERVICE_SCHEMA", "")
VERSION = "1.37"


def templates() -> Iterator[dict[str, Any]]:
    """The pods' templates."""
    cluster = SPEC["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


@pytest.mark.parametrize("config", [SERVE, INNER], ids=["paceline.yaml", "rayservice.yaml"])
def test_an_application_is_wired(config: dict[str, Any]) -> None:
    (application,) = config["applications"]
    assert application["import_path"] == "paceline.ray:build_app"
    args = AppArgs.model_validate(application["args"])
    assert args.workers.keys() == {"target", "draft"}
    names = {each["name"] for each in application["deployments"]}
    assert names == {"TargetWorker", "DraftWorker", "Coordinator"}
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, function = path.rpartition(".")
        assert callable(getattr(import_module(module), function))
    # Each level has the fields of Serve's schema that are used here, and no others.
    assert config.keys() == {"proxy_location", "http_options", "grpc_options", "applications"}
    assert application.keys() == {"name", "route_prefix", "import_path", "args", "deployments"}


def test_the_default_manifest_serves_this_machine_alone() -> None:
    assert SERVE["http_options"]["host"] == "127.0.0.1"


def test_a_rayservice_exposes_both_ports() -> None:
    ports = {"serve": INNER["http_options"]["port"], "serve-grpc": INNER["grpc_options"]["port"]}
    for template in templates():
        (container,) = template["spec"]["containers"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports.items() <= named.items()
    (port,) = GRPC_SERVICE["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (ports["serve-grpc"], "serve-grpc")
    own = {key: value for key, value in GRPC_SERVICE["spec"]["selector"].items() if "ray.io" not in key}
    assert all(own.items() <= template["metadata"]["labels"].items() for template in templates())


def test_a_rayservice_has_room_for_its_replicas() -> None:
    (group,) = SPEC["rayClusterConfig"]["workerGroupSpecs"]
    args = AppArgs.model_validate(INNER["applications"][0]["args"])
    replicas = {each["name"]: each["num_replicas"] for each in INNER["applications"][0]["deployments"]}
    tiers = {"TargetWorker": args.target, "DraftWorker": args.draft}
    gpus = sum(
        replicas[name] * tier.deployment_config["ray_actor_options"]["num_gpus"]
        for name, tier in tiers.items()
        if tier is not None
    )
    (container,) = group["template"]["spec"]["containers"]
    assert gpus == group["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert replicas["Coordinator"] <= group["replicas"]


def test_the_version_of_ray_is_the_pinned_one() -> None:
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text().splitlines()
    assert f"ray=={SPEC['rayClusterConfig']['rayVersion']}" in pinned


def test_pods_and_service_are_valid() -> None:
    for number, template in enumerate(templates()):
        metadata = {"name": f"pod-{number}", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        assert kubernetes_validate.validate(pod, VERSION, strict=True) == VERSION
    assert kubernetes_validate.validate(GRPC_SERVICE, VERSION, strict=True) == VERSION


@pytest.mark.skipif(not SCHEMA, reason="PACELINE_RAYSERVICE_SCHEMA is not set")
def test_a_rayservice_follows_its_schema() -> None:
    validator = jsonschema_rs.validator_for(json.loads(Path(SCHEMA).read_text()))
    validator.validate(RAYSERVICE)
    misspelt = copy.deepcopy(RAYSERVICE)
    misspelt["spec"]["serveConfig"] = misspelt["spec"].pop("serveConfigV2")
    assert not validator.is_valid(misspelt)
