"""Parses a child's announcement and its last output. No I/O."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.validation import host_and_port


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises InvalidArgumentError."""
    return host_and_port("address", address)


class Announced(NamedTuple):
    """Addresses of a ready child; empty if absent."""

    address: str = ""
    http: str = ""
    metrics: str = ""


def announced_addresses(line: str) -> Announced | None:
    """The addresses in a ready line; None for any other line."""
    try:
        event = json.loads(line)
        if event["event"] != "ready":
            return None
        more = [event.get(f"{name}_address", "") for name in ("http", "metrics")]
        announced = Announced(event["address"], *more)
        for address in (announced.address, *filter(None, more)):
            split_address(address)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return announced


def shell_code(exit_code: int) -> int:
    """The exit code as shells report it: 128 + signal number; 0 becomes 1, because the end was unexpected."""
    return 128 - exit_code if exit_code < 0 else exit_code or 1


def _signal_name(number: int) -> str:
    """Real-time signals other than the first and last have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(exit_code: int, tail: Sequence[str]) -> str:
    """The child's error line if it wrote one, else a description of its end."""
    for line in reversed(tail):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    how = f"was killed by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"
    said = next((line for line in reversed(tail) if line), "")
    return f"{how}: {said}" if said and exit_code > 0 else how
