"""Paceline on Ray Serve: target workers, draft workers and coordinators as three deployments.

    serve run paceline.ray:build_app target='{"model": "embedded:target"}'

Requires the extra `ray`. Public names are loaded on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from paceline.ray.build import build_app
    from paceline.ray.config import AppArgs

    app: Any
    """The embedded pair, built, for `serve build`, which takes no builder."""

__all__ = ["AppArgs", "app", "build_app"]


def __getattr__(name: str) -> Any:
    """Load a public name. Raises AttributeError for any other."""
    from importlib import import_module

    if name == "app":
        return import_module("paceline.ray.build").build_app(import_module("paceline.ray.config").AppArgs())
    modules = {"AppArgs": "config", "build_app": "build"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"paceline.ray.{modules[name]}"), name)
