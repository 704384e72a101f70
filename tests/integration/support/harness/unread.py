"""Clients that do not read: little is sent to them, then nothing more is made for them."""

from __future__ import annotations

from collections.abc import Callable

from harness.waiting import until
from paceline.core.limits import MAX_UNREAD_TOKENS

NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384))
"""Options of a channel with a window of a dozen messages: each of a smaller one would be waited for."""


def until_it_stands_still(generated: Callable[[], float]) -> float:
    """The number of tokens at which a stream pauses that nobody reads."""
    looks = [0.0]

    def stands_still() -> bool:
        looks.append(generated())
        return looks[-1] == looks[-2] >= MAX_UNREAD_TOKENS

    until(stands_still, "the pause of a request that nobody reads", timeout=25.0, pause=0.2)
    return looks[-1]
