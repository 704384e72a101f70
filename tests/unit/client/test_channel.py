"""How the clients reach a server."""

from __future__ import annotations

import pytest

from paceline.client.channel import channel_options
from paceline.core import limits


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:50", True),
        ("[::1]:50", True),
        ("localhost:50", True),
        ("10.0.0.1:50", False),
        ("paceline.example:50", False),
        ("dns:///paceline.example:50", False),
    ],
)
def test_loopback_never_goes_through_a_proxy(address: str, loopback: bool) -> None:
    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) == loopback


def test_messages_have_the_systems_bound() -> None:
    options = dict(channel_options("h:1"))
    assert options["grpc.max_receive_message_length"] == limits.MAX_MESSAGE_BYTES
    assert options["grpc.max_send_message_length"] == limits.MAX_MESSAGE_BYTES
