"""Arguments of the application: our settings under their usual names, and Ray's passed on.

Each tier takes the fields of its process's configuration (`paceline.core.config`) but those that a replica
sets itself, such as its address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig, WorkerConfig
from paceline.core.errors import InvalidArgumentError

EMBEDDED_TARGET = "embedded:target"
EMBEDDED_DRAFT = "embedded:draft"
SET_BY_REPLICA = frozenset({"host", "exit_with_parent"})
SET_BY_WORKER = SET_BY_REPLICA | {"port", "local_socket"}
SET_BY_COORDINATOR = SET_BY_REPLICA | {"targets", "drafts", "http", "http_port"}
OWNED = {
    # Coordinators learn from the router which replicas there are.
    "request_router_config": "is set by Paceline",
    "placement_group_bundles": "is given as placement_group_config.bundles",
    "placement_group_strategy": "is given as placement_group_config.strategy",
}
"""Options of a deployment that are not passed on, and why."""
SOMEWHERE = "127.0.0.1"
"""Stands for a replica's address while its settings are checked."""


class PlacementGroup(BaseModel):
    """Resources that each replica reserves together. The replica itself runs in the first bundle."""

    model_config = ConfigDict(extra="forbid")

    bundles: list[dict[str, float]] = Field(min_length=1)
    """Amounts by resource, such as `{"GPU": 1}`."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "STRICT_PACK"


class Tier(BaseModel):
    """One deployment: how Ray runs it, and the settings of its processes."""

    model_config = ConfigDict(extra="forbid")

    deployment_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the Serve deployment, such as `ray_actor_options`. They win over Paceline's own."""
    placement_group_config: PlacementGroup | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The process's settings that were given."""
        return {name: getattr(self, name) for name in self.model_fields_set - Tier.model_fields.keys()}

    @model_validator(mode="after")
    def _check_deployment(self) -> Self:
        for name in self.deployment_config.keys() & OWNED.keys():
            raise InvalidArgumentError(f"deployment_config.{name}", OWNED[name])
        return self


def _tier(name: str, config: type[Any], without: frozenset[str], **defaults: Any) -> type[Tier]:
    """A tier with the fields of a configuration."""
    types = get_type_hints(config)
    own: dict[str, Any] = {
        each.name: (types[each.name], ... if each.default is MISSING else each.default)
        for each in fields(config)
        if each.name not in without
    }
    own |= {key: (types[key], value) for key, value in defaults.items()}
    made: type[Tier] = create_model(name, __base__=Tier, **own)
    return made


if TYPE_CHECKING:  # the fields used here

    class WorkerTier(Tier):
        """A tier of workers."""

        model: str
        handover_timeout: float = 5.0

    class TargetTier(WorkerTier):
        """The tier of target workers."""

    class DraftTier(WorkerTier):
        """The tier of draft workers."""

    class CoordinatorTier(Tier):
        """The tier of coordinators."""

        drain_timeout: float = 10.0

else:
    TargetTier = _tier("TargetTier", TargetConfig, SET_BY_WORKER)
    DraftTier = _tier("DraftTier", DraftConfig, SET_BY_WORKER)
    CoordinatorTier = _tier("CoordinatorTier", CoordinatorConfig, SET_BY_COORDINATOR, tokenizer=None)


class AppArgs(BaseModel):
    """The arguments of `build_app`. A change in any of them replaces every replica."""

    model_config = ConfigDict(extra="forbid")

    target: TargetTier = Field(default_factory=lambda: TargetTier(model=EMBEDDED_TARGET))
    draft: DraftTier | None = None
    """None serves without a draft worker. If it is not given, the embedded target has the embedded draft."""
    coordinator: CoordinatorTier = Field(default_factory=CoordinatorTier)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "draft" not in self.model_fields_set and self.target.model == EMBEDDED_TARGET:
            self.draft = DraftTier(model=EMBEDDED_DRAFT)
        for role, tier in self.workers.items():
            with _naming(role):
                worker_config(role, tier.settings, SOMEWHERE)
        with _naming("coordinator"):
            coordinator_config(self.coordinator_settings, SOMEWHERE, ("a:1",), ())
        return self

    @property
    def workers(self) -> dict[str, WorkerTier]:
        """The tiers of workers by role."""
        return {"target": self.target, **({} if self.draft is None else {"draft": self.draft})}

    @property
    def coordinator_settings(self) -> dict[str, Any]:
        """Settings of each coordinator, which takes the target's tokenizer unless another is named."""
        return {"tokenizer": self.target.model} | self.coordinator.settings


@contextlib.contextmanager
def _naming(tier: str) -> Iterator[None]:
    """Name the tier as well in an InvalidArgumentError."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{tier}.{error.field}", error.description) from None


def worker_config(role: str, settings: dict[str, Any], host: str) -> WorkerConfig:
    """The configuration of a worker on a node. Raises InvalidArgumentError."""
    configs: dict[str, type[WorkerConfig]] = {"target": TargetConfig, "draft": DraftConfig}
    return configs[role](**settings, host=host, exit_with_parent=True)


def coordinator_config(
    settings: dict[str, Any], host: str, targets: tuple[str, ...], drafts: tuple[str, ...]
) -> CoordinatorConfig:
    """The configuration of a coordinator on a node. Raises InvalidArgumentError."""
    return CoordinatorConfig(**settings, host=host, targets=targets, drafts=drafts, http=False)
