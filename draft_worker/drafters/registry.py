"""The drafters by the names that `--drafter` takes."""

from __future__ import annotations

from typing import Final

from draft_worker.drafters.interface import DrafterKind
from draft_worker.drafters.model import ModelDrafter
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading.build import build

DRAFTERS: Final[dict[str, DrafterKind]] = {"model": DrafterKind(build, ModelDrafter.of)}


def kind_of(config: DraftConfig) -> DrafterKind:
    """The drafter that a configuration names. Raises InvalidArgumentError naming `drafter`."""
    kind = DRAFTERS.get(config.drafter)
    if kind is None:
        raise InvalidArgumentError("drafter", f"must be one of {', '.join(DRAFTERS)}, got {config.drafter!r}")
    return kind
