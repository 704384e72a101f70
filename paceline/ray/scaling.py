"""An autoscaling policy for all three deployments, by load and by use of the cache.

Serve pickles the policy by value: this module must import nothing of Paceline.
"""

from __future__ import annotations

import math
from typing import Any

PATH = f"{__name__}:replicas_for_load"
LOAD = "load"
"""A replica's metric: sequences on a worker, requests at a coordinator, waiting ones included."""
CACHE_USE = "cache_use"
"""A replica's metric: the share of its cache blocks that sequences hold, from 0 to 1."""
FULL = 0.8
"""Share of the cache above which another worker is wanted: the rest is room for sequences to grow."""


def replicas_for_load(ctx: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy function: the number of replicas wanted, and no state.

    `target_ongoing_requests` of the deployment's autoscaling configuration is the load wanted on a replica.
    """
    metrics = ctx.aggregated_metrics or {}
    loads, uses = (list(metrics.get(name, {}).values()) for name in (LOAD, CACHE_USE))
    if not loads and not uses:
        return ctx.target_num_replicas, {}
    wanted = math.ceil(max(sum(loads) / ctx.config.get_target_ongoing_requests(), sum(uses) / FULL))
    return min(max(wanted, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas), {}
