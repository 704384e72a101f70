"""Builds the Serve application from its arguments."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from paceline.ray.config import AppArgs, Tier
from paceline.ray.coordinator import LEFT_OUT_SECONDS, CoordinatorReplica
from paceline.ray.resources import Reservation, complaint
from paceline.ray.router import PATH
from paceline.ray.worker import DraftWorker, TargetWorker
from paceline.supervisor.children import STOP_MARGIN

log = logging.getLogger(__name__)

WORKERS = {"target": TargetWorker, "draft": DraftWorker}
COMMON = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}
"""Serve replaces a replica after three failed checks in a row. Its own period is 10 s."""
MAX_ONGOING_REQUESTS = 1000
"""Proxied requests of a coordinator, which has bounds of its own. Serve's default is 5."""
DRAIN_MARGIN = 15.0
"""Seconds that Serve gives a coordinator beyond its own drain, before it kills the replica."""
WORKER_MARGIN = STOP_MARGIN + 5.0
"""Seconds that Serve gives a worker beyond its handover: the replica kills it first, if it must."""


# Serve needs the annotation as a class, so this module must not postpone annotations.
def build_app(args: AppArgs) -> Any:
    """The application: coordinators, their target workers and their draft workers.

    Logs a warning if no node of the cluster has room for a replica.
    """
    routed = {"request_router_config": RequestRouterConfig(request_router_class=PATH)}
    workers = {}
    for role, tier in args.workers.items():
        worker = _deployment(
            WORKERS[role],
            tier,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=tier.handover_timeout + WORKER_MARGIN,
            **routed,
        )
        workers[role] = worker.bind(tier.settings)
    coordinator = _deployment(
        serve.ingress()(CoordinatorReplica),
        args.coordinator,
        name="Coordinator",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.coordinator.drain_timeout + LEFT_OUT_SECONDS + DRAIN_MARGIN,
        **({} if _behind_haproxy() else routed),
    )
    return coordinator.bind(args.coordinator_settings, workers["target"], workers.get("draft"))


def _deployment(of: type[Any], tier: Tier, **own: Any) -> Any:
    """A deployment of a class. Options of the tier win over `own`."""
    placing, need = placement(tier)
    # A replacement starts before its predecessor stops, but GPUs are rarely free twice.
    surge = {"max_surge_percent": 0 if need.gpus else 100}
    if ray.is_initialized() and (text := complaint(own.get("name", of.__name__), need, _nodes())):
        log.warning("%s; its replicas wait until there is such a node", text)
    return serve.deployment(of).options(**{**COMMON, **own, **surge, **tier.deployment_config, **placing})


def placement(tier: Tier) -> tuple[dict[str, Any], Reservation]:
    """Serve's options for the resources of a replica, and what these are together.

    A replica's own resources are those of its first bundle, if it has bundles: without `num_gpus` it would
    see every GPU of its node.
    """
    group = tier.placement_group_config
    given: Mapping[str, Any] = tier.deployment_config.get("ray_actor_options", {})
    if group is None:
        actor = {"num_cpus": 1, **given}
        return {"ray_actor_options": actor}, Reservation([_resources(actor)])
    first = group.bundles[0]
    actor = {"num_cpus": first.get("CPU", 0), "num_gpus": first.get("GPU", 0), **given}
    options = {
        "ray_actor_options": actor,
        "placement_group_bundles": group.bundles,
        "placement_group_strategy": group.strategy,
    }
    strict = group.strategy.startswith("STRICT")
    spread = group.strategy.endswith("SPREAD")
    return options, Reservation(group.bundles, together=strict and not spread, apart=strict and spread)


def _resources(actor: Mapping[str, Any]) -> dict[str, float]:
    named = {
        "CPU": actor.get("num_cpus", 0),
        "GPU": actor.get("num_gpus", 0),
        "memory": actor.get("memory", 0),
    }
    return {name: amount for name, amount in {**named, **actor.get("resources", {})}.items() if amount}


def _nodes() -> Sequence[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _behind_haproxy() -> bool:
    """HAProxy chooses replicas by itself; Serve refuses a router for the deployment in front of it."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
