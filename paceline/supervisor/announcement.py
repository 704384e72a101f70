"""What a child says of itself, at its start and at its end. Pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence

from paceline.core.errors import InvalidArgumentError


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as its parts. Raises InvalidArgumentError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgumentError("address", f"must be host:port, got {address!r}")
    return host, int(port)


def announced_addresses(line: str) -> tuple[str, str] | None:
    """The address in a ready line, and that of HTTP or an empty string; None for any other line."""
    try:
        event = json.loads(line)
        if event["event"] != "ready":
            return None
        address: str = event["address"]
        http_address: str = event.get("http_address", "")
        split_address(address)
        if http_address:
            split_address(http_address)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return address, http_address


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
