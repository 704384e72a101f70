"""Replicas, workers and nodes that come and go under streams: none fails, and no token is lost or another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from harness.continuous import Continuous
from harness.ending import ended
from harness.history import History, Recording, validate
from harness.ray_cluster import parent_of, ready_workers
from harness.waiting import HANG, until

from paceline.client import Client
from paceline.core.errors import UnavailableError

if TYPE_CHECKING:
    from harness.continuous import Case
    from harness.ray_cluster import RayApp, RayCluster

pytestmark = pytest.mark.timeout(300)
STREAMS = 16
LONG = 1500
"""Tokens of a stream that takes longer than a coordinator drains."""
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "upscale_delay_s": 0,
    "downscale_delay_s": 1,
    "look_back_period_s": 2,
    "policy": {"policy_function": "paceline.ray.scaling:replicas_for_load"},
}


@pytest.fixture
def client(app: RayApp) -> Iterator[Client]:
    """Of the only coordinator, at its own port."""
    (address,) = app.coordinators(1)
    with Client(address) as client:
        yield client


def wait_for_targets(app: RayApp, client: Client, count: int, without: frozenset[int] = frozenset()) -> None:
    """Until Serve and a coordinator have so many target workers, none of them of these processes."""

    def there() -> bool:
        processes = {each.info.process_id for each in ready_workers(client) if each.info is not None}
        return app.replicas("TargetWorker") == count == len(processes) and not processes & without

    until(there, f"{count} target workers", pause=0.1)


@pytest.fixture
def two_targets(app: RayApp, client: Client) -> frozenset[int]:
    """Their processes."""
    app.scale("TargetWorker", 2)
    wait_for_targets(app, client, 2)
    return processes(client)


def processes(client: Client, role: str = "target") -> frozenset[int]:
    """Process ids of the ready workers."""
    return frozenset(each.info.process_id for each in ready_workers(client, role) if each.info is not None)


def test_targets_come_and_go_under_streams(app: RayApp, client: Client, cases: list[Case]) -> None:
    with Continuous([client], cases, STREAMS) as streams:
        streams.wait_for_more(1)
        app.scale("TargetWorker", 2)
        wait_for_targets(app, client, 2)
        both = processes(client)
        streams.wait_for_more(STREAMS)
        app.scale("TargetWorker", 1)
        wait_for_targets(app, client, 1)
        assert all(ended(each, 60) for each in both - processes(client)), "the other one has drained"
        streams.wait_for_more(STREAMS)
    assert not streams.resumed, "no client noticed"


@pytest.mark.parametrize("victim", ["child", "replica"])
def test_a_killed_worker_is_replaced(
    app: RayApp, client: Client, cases: list[Case], two_targets: frozenset[int], victim: str
) -> None:
    child = min(two_targets)
    with Continuous([client], cases, STREAMS) as streams:
        streams.wait_for_more(1)
        os.kill(child if victim == "child" else parent_of(child), signal.SIGKILL)
        assert ended(child, 60), "a worker does not outlive its replica"
        streams.wait_for_more(STREAMS)
        wait_for_targets(app, client, 2, without=frozenset({child}))
        streams.wait_for_more(STREAMS)
    assert not streams.resumed, "no client noticed"


def test_workers_are_rolled_by_a_new_configuration(
    app: RayApp, client: Client, cases: list[Case], two_targets: frozenset[int]
) -> None:
    drafts = processes(client, "draft")

    def change(application: dict[str, Any]) -> None:
        for each in application["deployments"]:
            if each["name"] != "Coordinator":
                each["ray_actor_options"] = {"num_cpus": 0.5}

    with Continuous([client], cases, STREAMS) as streams:
        streams.wait_for_more(1)
        app.deploy(change)
        wait_for_targets(app, client, 2, without=two_targets)
        until(lambda: processes(client, "draft") and not processes(client, "draft") & drafts, "another draft")
        streams.wait_for_more(STREAMS)
    app.wait_until_running()
    assert not streams.resumed, "no client noticed"


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_streams_of_a_lost_coordinator_go_on(app: RayApp, cases: list[Case], end: str) -> None:
    app.scale("Coordinator", 2)
    app.wait_until_running()
    both = app.coordinators(2)
    with Client(app.proxy) as proxied:
        known = proxied.status(timeout=HANG).coordinator.coordinators
    assert {*known} == both.keys()
    with Client(known) as own, Client(app.proxy) as proxied:
        with Continuous([own, proxied], cases, STREAMS) as streams:
            streams.wait_for_more(1)
            if end == "killed":
                os.kill(next(iter(both.values())), signal.SIGKILL)
                until(lambda: app.replicas("Coordinator") == 1, "the loss")
            else:
                app.scale("Coordinator", 1)
            streams.wait_for_more(2 * STREAMS)
            app.wait_until_running()
            streams.wait_for_more(STREAMS)
        assert streams.resumed
    app.scale("Coordinator", 1)
    until(lambda: app.replicas("Coordinator") == 1, "one coordinator")
    app.wait_until_running()


def test_long_streams_of_a_stopped_coordinator_end_in_order(app: RayApp) -> None:
    """Through the proxy, for whose streams Serve would wait, and then cut them without a word."""
    app.scale("Coordinator", 2)
    app.wait_until_running()
    app.coordinators(2)
    long = {"max_tokens": LONG, "ignore_eos": True, "temperature": 0.0}
    streams = [Recording(app.proxy, [40, 41, number], long) for number in range(STREAMS)]
    for stream in streams:
        stream.wait_for_tokens(1)
    app.scale("Coordinator", 1)
    histories = [stream.result() for stream in streams]
    for history in histories:
        validate(without_farewell(history), complete=False)
    errors = [history.error for history in histories if history.error is not None]
    assert errors
    assert all(isinstance(error, UnavailableError) and "stopping" in str(error) for error in errors)
    app.wait_until_running()


def without_farewell(history: History) -> History:
    """Without the empty message that carries a status through the proxy."""
    kept = [each for each in history.messages if each.ByteSize()]
    assert len(history.messages) - len(kept) == (history.error is not None)
    return replace(history, messages=kept)


@pytest.mark.parametrize("kill", [False, True], ids=["removed", "killed"])
def test_a_lost_node_is_survived(
    app: RayApp,
    cluster: RayCluster,
    client: Client,
    cases: list[Case],
    two_targets: frozenset[int],
    kill: bool,
) -> None:
    cluster.add_node()
    node = next(each.address.partition(":")[0] for each in ready_workers(client))
    lost = frozenset(
        each.info.process_id
        for each in ready_workers(client)
        if each.info is not None and each.address.startswith(f"{node}:")
    )
    with Continuous([client], cases, STREAMS) as streams:
        streams.wait_for_more(1)
        cluster.remove_node(node, kill=kill)
        streams.wait_for_more(STREAMS)
        wait_for_targets(app, client, 2, without=lost)
        streams.wait_for_more(STREAMS)
    assert not streams.resumed, "no client noticed"


def test_a_killed_controller_is_not_noticed(
    app: RayApp, client: Client, cases: list[Case], two_targets: frozenset[int]
) -> None:
    import ray

    with Continuous([client], cases, STREAMS) as streams:
        streams.wait_for_more(1)
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        before = ray.get(controller.get_pid.remote())
        os.kill(before, signal.SIGKILL)
        assert ended(before, 60)
        until(lambda: ray.get(controller.get_pid.remote()) != before, "another controller", pause=0.2)
        streams.wait_for_more(STREAMS)
        app.wait_until_running()
        streams.wait_for_more(STREAMS)
    assert not streams.resumed, "no client noticed"
    assert processes(client) == two_targets


def test_targets_scale_by_their_load(app: RayApp, cases: list[Case]) -> None:
    """A new policy replaces every replica, as new arguments do."""
    app.configure("TargetWorker", num_replicas=None, autoscaling_config=AUTOSCALING)
    app.wait_until_running()
    (address,) = app.coordinators(1)
    with Client(address) as client:
        wait_for_targets(app, client, 1)
        with Continuous([client], cases, STREAMS) as streams:
            wait_for_targets(app, client, 2)
            streams.wait_for_more(STREAMS)
        wait_for_targets(app, client, 1)


def test_nothing_is_left_after_a_shutdown(app: RayApp, client: Client) -> None:
    import ray
    from ray import serve

    workers = processes(client) | processes(client, "draft")
    replicas = {parent_of(each) for each in workers} | {client.status().coordinator.process_id}
    serve.shutdown()
    assert all(ended(each, 60) for each in workers | replicas)
    assert not ray.util.list_named_actors(all_namespaces=True)
