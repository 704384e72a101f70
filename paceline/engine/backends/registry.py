"""The registry of backends."""

from __future__ import annotations

from typing import Final

from paceline.engine.backends.compiled import compiled_backend
from paceline.engine.backends.fused_eager import fused_eager_backend
from paceline.engine.backends.interface import BackendFactory
from paceline.engine.backends.modules import modules_backend

BACKENDS: Final[dict[str, BackendFactory]] = {
    "torch": modules_backend,
    "fused_eager": fused_eager_backend,
    "compiled": compiled_backend,
}
"""From the most general to the most specific: the last one that serves a model is used."""
