"""Channel options and settings of the clients."""

from __future__ import annotations

from typing import Any

import pytest
from harness.refusals import refused

from paceline import AsyncClient, Client, Tls
from paceline.client.channel import CHANNEL_OPTIONS
from paceline.core import limits


def test_messages_have_the_systems_bound() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.max_receive_message_length"] == limits.MAX_MESSAGE_BYTES
    assert options["grpc.max_send_message_length"] == limits.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_unusable_settings_are_named(client: Any) -> None:
    for values, field in (
        ({"tls": True}, "tls"),
        ({"tls": Tls(ca="no/such/file")}, "tls_ca"),
        *(({"api_key": no_header_can_carry}, "api_key") for no_header_can_carry in ("", "a\nb", "ключ", 5)),
    ):
        with refused(field):
            client("h:1", **values)
    with refused("tls_key"):
        Tls(certificate="c")
