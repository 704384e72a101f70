"""The builder: options of the deployments, and what it says of a cluster that has no room."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from harness.ray_cluster import RayCluster

Deployments = Callable[..., dict[str, Any]]


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> Deployments:
    """The deployments of an application with these arguments, by name."""
    from ray.serve._private.build_app import build_app as finished

    from paceline.ray import AppArgs, build_app

    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)

    def built(**values: Any) -> dict[str, Any]:
        application = build_app(AppArgs.model_validate(values))
        return {each.name: each for each in finished(application, name="paceline").deployments}

    return built


def router(deployment: Any) -> str:
    path = deployment._deployment_config.request_router_config.request_router_class
    return str(path)


def test_there_are_three_deployments(deployments: Deployments) -> None:
    built = deployments()
    assert built.keys() == {"TargetWorker", "DraftWorker", "Coordinator"}
    assert all(router(each).endswith("ReplicaListing") for each in built.values())
    assert all(each._deployment_config.max_surge_percent == 100 for each in built.values())
    assert built["Coordinator"].max_ongoing_requests == 1000
    assert built["Coordinator"]._deployment_config.graceful_shutdown_timeout_s > 10
    slow = deployments(target={"model": "m", "handover_timeout": 100}, coordinator={"drain_timeout": 200})
    assert slow["TargetWorker"]._deployment_config.graceful_shutdown_timeout_s > 100
    assert slow["Coordinator"]._deployment_config.graceful_shutdown_timeout_s > 200
    assert deployments(draft=None).keys() == {"TargetWorker", "Coordinator"}


def test_the_application_for_serve_build_is_built() -> None:
    from ray.serve import Application

    from paceline import ray

    assert isinstance(ray.app, Application)


def test_serve_build_writes_a_manifest(tmp_path: Path) -> None:
    file = tmp_path / "built.yaml"
    command = [sys.executable, "-m", "ray.serve.scripts", "build", "paceline.ray:app", "-o", str(file)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["import_path"] == "paceline.ray:app"
    names = {each["name"] for each in application["deployments"]}
    assert names == {"TargetWorker", "DraftWorker", "Coordinator"}


def test_options_of_a_tier_win(deployments: Deployments) -> None:
    options = {"max_surge_percent": 50, "health_check_period_s": 7, "ray_actor_options": {"num_cpus": 3}}
    built = deployments(target={"model": "m", "deployment_config": options})["TargetWorker"]
    assert built._deployment_config.max_surge_percent == 50
    assert built._deployment_config.health_check_period_s == 7
    assert built.ray_actor_options["num_cpus"] == 3


def test_a_bundles_gpus_are_the_replicas_own(deployments: Deployments) -> None:
    """Else the replica would see every GPU of its node; and a replica on GPUs has no room for a surge."""
    group = {"bundles": [{"CPU": 2, "GPU": 1}]}
    built = deployments(target={"model": "m", "placement_group_config": group})["TargetWorker"]
    assert built.ray_actor_options["num_gpus"] == 1
    assert built.ray_actor_options["num_cpus"] == 2
    assert built._replica_config.placement_group_bundles == group["bundles"]
    assert built._deployment_config.max_surge_percent == 0


def test_behind_haproxy_only_workers_have_our_router(
    deployments: Deployments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    built = deployments()
    ours = {name: router(each).endswith("ReplicaListing") for name, each in built.items()}
    assert ours == {"TargetWorker": True, "DraftWorker": True, "Coordinator": False}


def test_what_no_node_has_is_said(
    cluster: RayCluster, deployments: Deployments, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"ray_actor_options": {"num_gpus": 2}}
    with caplog.at_level(logging.WARNING, "paceline.ray"):
        deployments(target={"model": "m", "deployment_config": options})
    (record,) = [each for each in caplog.records if each.name.startswith("paceline.ray")]
    assert "TargetWorker: no node has 1 CPU, 2 GPU; the nodes have 4 CPU; 4 edge" in record.getMessage()
    caplog.clear()
    deployments()
    assert not [each for each in caplog.records if each.name.startswith("paceline.ray")]


@pytest.mark.parametrize(
    ("device", "gpus", "given"), [("auto", 0, "cpu"), ("cpu", 0, "cpu"), ("auto", 1, "auto")]
)
def test_a_replica_uses_the_gpus_it_has(device: str, gpus: int, given: str) -> None:
    from paceline.core.config import TargetConfig
    from paceline.ray.worker import for_resources

    assigned = {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}
    assert for_resources(TargetConfig(model="m", device=device), assigned).device == given


def test_a_device_without_a_gpu_is_refused() -> None:
    from paceline.core.config import TargetConfig
    from paceline.core.errors import InvalidArgumentError
    from paceline.ray.worker import for_resources

    with pytest.raises(InvalidArgumentError, match="device: cuda requires num_gpus"):
        for_resources(TargetConfig(model="m", device="cuda"), {"CPU": 1.0})
