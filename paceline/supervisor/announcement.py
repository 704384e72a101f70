"""What a child says of itself, at its start and at its end. Pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.validation import host_and_port


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as its parts. Raises InvalidArgumentError."""
    return host_and_port("address", address)


class Announced(NamedTuple):
    """Addresses of a child that is ready; empty is none."""

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
    """As a shell reports it: 128 + signal number; never 0, since the end was not asked for."""
    return 128 - exit_code if exit_code < 0 else exit_code or 1


def _signal_name(number: int) -> str:
    """Those between the first and the last real-time signal have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(exit_code: int, tail: Sequence[str]) -> str:
    """The child's own error line if it wrote one, else how it ended."""
    for line in reversed(tail):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    how = f"was ended by {_signal_name(-exit_code)}" if exit_code < 0 else f"ended with code {exit_code}"
    said = next((line for line in reversed(tail) if line), "")
    return f"{how}: {said}" if said and exit_code > 0 else how
