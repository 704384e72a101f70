"""Servers that send invalid messages: both clients raise InternalError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from paceline.core.errors import InternalError

RUBBISH = b"\xff"
UNARY = ("Tokenize", "Detokenize", "ListModels", "GetStatus", "ApplyChatTemplate")


@pytest.fixture
def rubbish(messages: Any) -> Iterator[str]:
    """The address of a server whose answers are no messages, but for the first one of a stream."""

    def generate(request: bytes, context: Any) -> Iterator[bytes]:
        yield messages.good[0].SerializeToString()
        yield RUBBISH

    methods = {name: grpc.unary_unary_rpc_method_handler(lambda *_: RUBBISH) for name in UNARY}
    methods["Generate"] = grpc.unary_stream_rpc_method_handler(generate)
    with ThreadPoolExecutor(2) as executor:
        server = grpc.server(executor)
        handler = grpc.method_handlers_generic_handler("paceline.v1.GenerationService", methods)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.tokenize("x"),
        lambda client: client.detokenize([1]),
        lambda client: client.models(),
        lambda client: client.status(),
        lambda client: client.chat([{"role": "user", "content": "x"}]),
    ],
    ids=UNARY,
)
def test_an_invalid_answer_is_an_internal_error(
    connect: Callable[..., Any], rubbish: str, ask: Callable[[Any], Any]
) -> None:
    with pytest.raises(InternalError):
        ask(connect(rubbish))


def test_an_invalid_message_breaks_the_stream_for_good(connect: Callable[..., Any], rubbish: str) -> None:
    """It is not the stream's end, and is not resumed."""
    stream = connect(rubbish).stream("x")
    with pytest.raises(InternalError):
        list(stream)
    assert stream.num_resumes == 0
