"""A Serve request router that also tells this process of the replicas there are.

Serve pickles the class by value, so its methods import what they need.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import RequestRouterConfig

PATH = f"{__name__}:ReplicaListing"
Default: Any = RequestRouterConfig().get_request_router_class()
"""Serve's own router, which chooses as ever."""


class ReplicaListing(Default):  # type: ignore[misc]  # Ray has no types here
    """Passes every list of replicas on to `paceline.ray.directory`."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's hook, called with the whole list at each change, in the router's thread."""
        super().update_replicas(replicas)
        from paceline.ray.directory import Replica, publish

        publish(
            (self._deployment_id.app_name, self._deployment_id.name),
            [
                Replica(replica.replica_id.unique_id, replica.replica_metadata["address"])
                for replica in replicas
                if "address" in replica.replica_metadata
            ],
        )
