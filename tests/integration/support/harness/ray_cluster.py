"""A Ray cluster of several nodes on this machine, and Paceline on it.

Ray is imported inside, since not every environment has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.waiting import HANG, until
from paceline.client import Client, WorkerState, WorkerStatus
from paceline.core.errors import PacelineError

MANIFEST = Path(__file__).parents[4] / "deploy/ray/paceline.yaml"
APPLICATION = "paceline"
ENVIRONMENT = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
DRAIN_SECONDS = 1.0
"""A coordinator's, less than a long stream takes."""
SMALL = {"object_store_memory": 80 * 1024 * 1024}
EDGE = "edge"
"""A resource of the head alone, which has no CPUs: coordinators run there, and workers on the other nodes."""


@dataclass
class RayCluster:
    """Nodes at 127.0.0.2 and up: Ray hangs with 127.0.0.1."""

    cluster: Any
    folder: Path
    dashboard: str
    """URL."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """By address; the head is the first."""
    _hosts: int = 2

    def add_node(self) -> str:
        """One more; its address."""
        self._hosts += 1
        address = f"127.0.0.{self._hosts}"
        self.nodes[address] = self.cluster.add_node(node_ip_address=address, num_cpus=4, **SMALL)
        return address

    def remove_node(self, address: str, *, kill: bool = False) -> None:
        """With all its processes; `kill` gives it no time to say goodbye."""
        self.cluster.remove_node(self.nodes.pop(address), allow_graceful=not kill)

    def serve(self, *arguments: str) -> str:
        """Run Ray's `serve` command; its output."""
        command = [sys.executable, "-m", "ray.serve.scripts", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout + run.stderr


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """A cluster of so many nodes, this process connected to it. Nothing of it is left in the end."""
    # The path of a socket has a hundred bytes.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    os.environ.update(ENVIRONMENT, RAY_TMPDIR=str(folder))
    import ray
    from ray.cluster_utils import Cluster

    port = free_port()
    # `serve deploy` and `serve status` ask the dashboard.
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 0, "resources": {EDGE: 4}, **SMALL, **dashboard}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        running = RayCluster(cluster, folder, f"http://127.0.0.1:{port}", {"127.0.0.2": cluster.head_node})
        for _ in range(nodes - 1):
            running.add_node()
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        yield running
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RayApp:
    """The application of the manifest, on free ports."""

    cluster: RayCluster
    manifest: dict[str, Any]
    http_url: str
    proxy: str
    """host:port of Serve's gRPC proxy."""

    def file(self) -> str:
        """The manifest as it is now, in a file."""
        file = self.cluster.folder / "manifest.yaml"
        file.write_text(yaml.safe_dump(self.manifest))
        return str(file)

    def deploy(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Submit the manifest with a change to its application. Later calls keep earlier changes."""
        change(self.manifest["applications"][0])
        self.cluster.serve("deploy", "--address", self.cluster.dashboard, self.file())

    def configure(self, deployment: str, **options: Any) -> None:
        """Submit the manifest with other options of a deployment; None takes one out."""

        def change(application: dict[str, Any]) -> None:
            (its,) = [each for each in application["deployments"] if each["name"] == deployment]
            its |= options
            for name in [name for name, value in its.items() if value is None]:
                del its[name]

        self.deploy(change)

    def scale(self, deployment: str, replicas: int) -> None:
        """Change the number of replicas of a deployment."""
        self.configure(deployment, num_replicas=replicas)

    def wait_until_running(self) -> None:
        """Until Serve says that all is as it was told. Fails if Serve gives up."""
        from ray import serve

        def running() -> bool:
            application = serve.status().applications.get(APPLICATION)
            if application is not None and application.status == "DEPLOY_FAILED":
                raise AssertionError(application)
            return application is not None and application.status == "RUNNING"

        until(running, "a running application", pause=0.1)

    def replicas(self, deployment: str) -> int:
        """Replicas that Serve lists as running."""
        from ray import serve

        deployments = serve.status().applications[APPLICATION].deployments
        # There are none while the application is built again.
        return deployments[deployment].replica_states.get("RUNNING", 0) if deployments else 0

    def coordinators(self, count: int) -> dict[str, int]:
        """Own addresses of so many coordinators, with their process ids. The proxy asks any of them."""
        found: dict[str, int] = {}

        def all_answered() -> bool:
            with Client(self.proxy) as client:
                one = client.status(timeout=HANG).coordinator
                found[one.address] = one.process_id
            return len(found) == count

        until(all_answered, f"the status of {count} coordinators")
        return found


def ready_workers(client: Client, role: str = "target") -> list[WorkerStatus]:
    """The workers of a role that a coordinator is connected to and gives new sequences."""
    with contextlib.suppress(PacelineError):
        workers = client.status(timeout=HANG).workers
        return [each for each in workers if each.role == role and each.state is WorkerState.READY]
    return []


@contextlib.contextmanager
def ray_app(cluster: RayCluster) -> Iterator[RayApp]:
    """The manifest's application, running; shut down in the end."""
    from ray import serve

    manifest = yaml.safe_load(MANIFEST.read_text())
    # All nodes are on one machine and would share the ports of their proxies.
    manifest["proxy_location"] = "HeadOnly"
    http, grpc = free_port(), free_port()
    manifest["http_options"]["port"], manifest["grpc_options"]["port"] = http, grpc
    tiers = manifest["applications"][0]["args"]
    tiers["coordinator"]["deployment_config"] = {"ray_actor_options": {"num_cpus": 0, "resources": {EDGE: 1}}}
    tiers["coordinator"]["drain_timeout"] = DRAIN_SECONDS
    app = RayApp(cluster, manifest, f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    cluster.serve("run", "--address", cluster.cluster.address, "--non-blocking", app.file())
    try:
        app.wait_until_running()
        yield app
    finally:
        serve.shutdown()


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def parent_of(pid: int) -> int:
    """The parent of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])
