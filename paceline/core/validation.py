"""Type checks. Each raises InvalidArgumentError naming the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, Literal

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError


def require(condition: bool, name: str, message: str) -> None:
    """Raise InvalidArgumentError naming `name` unless `condition` holds."""
    if not condition:
        raise InvalidArgumentError(name, message)


def number(name: str, value: Any) -> float:
    """`value` as a finite float; bool is refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(name, f"must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    require(math.isfinite(number), name, "must be finite")
    return number


def integer(name: str, value: Any) -> int:
    """`value` as an int; bool is refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(name, f"must be an integer, got {type(value).__name__}")
    return value


_HOST: Final = re.compile(r"\[[^\s\[\]/,]+\]|[^\s\[\]/,:]+")
"""A name or an address; IPv6 addresses in brackets."""


def host_and_port(name: str, value: str) -> tuple[str, int]:
    """Split `host:port`."""
    host, _, port = value.rpartition(":")
    there = bool(_HOST.fullmatch(host)) and port.isdecimal() and 0 < int(port) < 65536
    require(there, name, f"must be host:port, got {value!r}")
    return host, int(port)


_WITH_SCHEME: Final = re.compile(r"[a-z][a-z0-9+-]*:.*[:/].*")


def worker_address(name: str, value: str) -> None:
    """`host:port`, or `scheme:place`, which the handler of the scheme checks."""
    if not _WITH_SCHEME.fullmatch(value):
        host_and_port(name, value)


_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def device(name: str, value: str) -> str:
    """Check the form of a device name; the model's process checks that the device exists."""
    there = isinstance(value, str) and bool(_DEVICE.fullmatch(value))
    choices = "auto, cpu, cuda or cuda:N (cuda:0 is the first GPU)"
    require(there, name, f"must be {choices}, got {value!r}")
    return value


def check_draw(prefix: str, temperature: float, top_k: int, top_p: float) -> None:
    """Check the three settings of how a token is drawn; their names in errors begin with `prefix`."""
    name, value = f"{prefix}temperature", number(f"{prefix}temperature", temperature)
    least, most = limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE
    require(value == 0 or least <= value <= most, name, f"must be 0 or in [{least}, {most}], got {value}")
    name = f"{prefix}top_p"
    require(0 < number(name, top_p) <= 1, name, f"must be in (0, 1], got {top_p}")
    name = f"{prefix}top_k"
    require(integer(name, top_k) >= 0, name, f"must be at least 0, got {top_k}")


def prompt_lookup_range(shortest: int | None, longest: int | None) -> None:
    """Check `prompt_lookup_min` and `prompt_lookup_max`; None stands for the default."""
    for name, value in (("prompt_lookup_min", shortest), ("prompt_lookup_max", longest)):
        if value is not None:
            most = limits.MAX_PROMPT_LOOKUP
            require(1 <= integer(name, value) <= most, name, f"must be between 1 and {most}, got {value}")
    least = limits.PROMPT_LOOKUP_MIN if shortest is None else shortest
    most = limits.PROMPT_LOOKUP_MAX if longest is None else longest
    name = "prompt_lookup_max" if shortest is None else "prompt_lookup_min"
    require(least <= most, name, f"prompt_lookup_min, {least}, is above prompt_lookup_max, {most}")


AUTO: Final = "auto"
DraftTokens = int | Literal["auto"]
"""K, or `auto` to let the coordinator choose it every round."""


def draft_tokens(name: str, value: Any) -> DraftTokens:
    """K within its bound, or `auto`."""
    return _number_or_auto(name, value, 0, limits.MAX_SPECULATIVE_TOKENS)


TreeWidth = int | Literal["auto"]
"""Most children of a node of a draft tree: 1 is a chain, and `auto` lets the coordinator choose chain or tree
every round."""


def tree_width(name: str, value: Any) -> TreeWidth:
    """A width within its bound, or `auto`."""
    return _number_or_auto(name, value, 1, limits.MAX_TREE_WIDTH)


def tree_nodes(name: str, value: Any) -> int:
    """A number of nodes within its bound."""
    return _between(name, value, 1, limits.MAX_TREE_NODES)


def number_of_drafts(name: str, value: Any) -> int:
    """A number of drafts of one sequence within its bound."""
    return _between(name, value, 1, limits.MAX_DRAFTS)


def _number_or_auto(name: str, value: Any, least: int, most: int) -> int | Literal["auto"]:
    if value == AUTO:
        return AUTO
    require(not isinstance(value, str), name, f"must be an integer or {AUTO!r}, got {value!r}")
    return _between(name, value, least, most)


def _between(name: str, value: Any, least: int, most: int) -> int:
    require(least <= integer(name, value) <= most, name, f"must be between {least} and {most}, got {value}")
    return int(value)


def draft_token_table(name: str, text: str) -> tuple[tuple[int, int, int], ...]:
    """Rows of (lowest number of sequences, highest, K) from a JSON list, without gaps from 1 upwards.

    Raises InvalidArgumentError naming the field.
    """
    if not text:
        return ()
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(name, f"must be a JSON list: {error}") from None
    require(isinstance(rows, list) and bool(rows), name, "must be a list of [lowest, highest, K]")
    table: list[tuple[int, int, int]] = []
    for i, row in enumerate(rows):
        where = f"{name}[{i}]"
        require(isinstance(row, list) and len(row) == 3, where, "must be [lowest, highest, K]")
        lowest, highest = integer(where, row[0]), integer(where, row[1])
        follows = table[-1][1] + 1 if table else 1
        require(lowest == follows, where, f"must begin with {follows}, got {lowest}")
        require(highest >= lowest, where, f"must end with {lowest} or more, got {highest}")
        require(row[2] != AUTO, where, f"must have a number for K, got {AUTO!r}")
        table.append((lowest, highest, int(draft_tokens(where, row[2]))))
    return tuple(table)


def items(name: str, value: Any) -> tuple[Any, ...]:
    """An iterable as a tuple; text is refused."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidArgumentError(name, f"must be a list, got {type(value).__name__}")
    return tuple(value)


def from_mapping(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Build a dataclass from a dictionary. Raises InvalidArgumentError for an unknown name."""
    known = {f.name for f in fields(cls)}
    for name in values:
        require(name in known, name, f"unknown parameter; known are {', '.join(sorted(known))}")
    return cls(**values)
