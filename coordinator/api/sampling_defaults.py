"""Sampling defaults from a model's `generation_config.json`.

They replace parameters that an HTTP request leaves out, as in vLLM. The SDK's SamplingParams has a value for
every parameter, so a gRPC request leaves nothing out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.api import chat_template
from paceline.core import limits
from paceline.core.config import NO_GENERATION_CONFIG, CoordinatorConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams

log = logging.getLogger(__name__)

FILE: Final = "generation_config.json"
_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for parameters that a request leaves out."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams except `max_tokens`."""
    max_tokens: int | None = None
    """Default length of an answer; the model's maximum length may reduce it."""

    def limit(self, room: int) -> int | None:
        """`max_tokens` for a prompt that leaves `room` tokens; None if the model sets no default."""
        return None if self.max_tokens is None else min(self.max_tokens, max(1, room))


def load(config: CoordinatorConfig) -> SamplingDefaults:
    """Load the defaults of the model that belongs to the coordinator's tokenizer.

    Raises InvalidArgumentError naming `generation_config` if the file cannot be read or followed.
    """
    if config.generation_config == NO_GENERATION_CONFIG:
        return SamplingDefaults()
    try:
        given = chat_template.read_json(config.tokenizer, FILE)
    except InvalidArgumentError as error:
        raise _refusal(error.description) from error
    defaults = of_file(given)
    told = dict(defaults.values)
    if defaults.max_tokens is not None:
        told["max_tokens"] = defaults.max_tokens
    if told:
        log.info(
            "HTTP requests default to %s, from %s of %s; --generation-config none"
            " uses Paceline's own defaults",
            ", ".join(f"{name} {value}" for name, value in told.items()),
            FILE,
            config.tokenizer,
        )
    return defaults


def of_file(given: Mapping[str, Any]) -> SamplingDefaults:
    """The sampling parameters in the file; null means unset. Raises InvalidArgumentError."""
    values = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    max_tokens = given.get("max_new_tokens")
    try:
        temperature = values.get("temperature")
        if isinstance(temperature, float) and 0 < temperature < limits.MIN_TEMPERATURE:
            values["temperature"] = limits.MIN_TEMPERATURE
        SamplingParams(**values, max_tokens=max_tokens)
    except InvalidArgumentError as error:
        name = "max_new_tokens" if error.field == "max_tokens" else error.field
        raise _refusal(f"its {name} {error.description}") from None
    return SamplingDefaults(values, max_tokens)


def _refusal(why: str) -> InvalidArgumentError:
    return InvalidArgumentError("generation_config", f"{FILE}: {why}; `none` ignores the file")
