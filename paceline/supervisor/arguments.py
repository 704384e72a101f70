"""Converts a configuration to command-line arguments, from which `paceline.cli` rebuilds an equal one."""

from __future__ import annotations

import enum
from dataclasses import MISSING, fields

from paceline.core.config import CoordinatorConfig, WorkerConfig

_REPEATABLE = {
    "targets": "target",
    "drafts": "draft",
    "stop_token_ids": "stop_token_id",
    "bad_words": "bad_word",
    "allowed_token_ids": "allowed_token_id",
}

Config = WorkerConfig | CoordinatorConfig


def flag(field: str) -> str:
    """The option of a field. Fields with several values use a repeated singular: `targets` is `--target`."""
    return "--" + _REPEATABLE.get(field, field).replace("_", "-")


def negative_flag(field: str) -> str:
    """The option that disables a field."""
    return "--no-" + flag(field).removeprefix("--")


def variable(field: str) -> str:
    """The environment variable of a field."""
    return "PACELINE_" + _REPEATABLE.get(field, field).upper()


def arguments(config: Config) -> list[str]:
    """Options for every field that differs from its default."""
    result = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        if isinstance(value, bool):
            result.append(flag(field.name) if value else negative_flag(field.name))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            result += [flag(field.name), str(item.value if isinstance(item, enum.Enum) else item)]
    return result
