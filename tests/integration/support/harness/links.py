"""Links to the workers of a coordinator that does not run."""

from __future__ import annotations

from coordinator.app import Coordinator
from coordinator.workers.directory.registry import open_directories


def link_workers(coordinator: Coordinator) -> None:
    """Make them as its run begins with: one for each address that it was given."""
    config = coordinator.config
    (static,) = open_directories(config.targets, config.drafts)
    coordinator.fleet.update(0, static.members)  # type: ignore[attr-defined]
