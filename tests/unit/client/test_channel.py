"""Channel options and settings of the clients."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import AsyncClient, Client, Tls
from paceline.client.channel import CHANNEL_OPTIONS
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError


def test_messages_have_the_systems_bound() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.max_receive_message_length"] == limits.MAX_MESSAGE_BYTES
    assert options["grpc.max_send_message_length"] == limits.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_unusable_settings_are_named(client: Any) -> None:
    for values, field in (
        ({"tls": True}, "tls"),
        ({"tls": Tls(ca="no/such/file")}, "tls_ca"),
        ({"api_key": ""}, "api_key"),
    ):
        with pytest.raises(InvalidArgumentError) as failure:
            client("h:1", **values)
        assert failure.value.field == field
    with pytest.raises(InvalidArgumentError) as failure:
        Tls(certificate="c")
    assert failure.value.field == "tls_key"
