"""The end of a handler that raised."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from paceline.core.errors import CancelledError
from paceline.rpc.server.error_guard import ShieldInterceptor


class Context:
    """A call whose status cannot be sent any more; a second try to end it is a usage error."""

    def __init__(self) -> None:
        self.ends = 0

    async def read(self) -> bytes:
        return b""

    async def abort_with_status(self, status: Any) -> None:
        self.ends += 1
        raise (
            grpc.aio.UsageError("Abort already called!") if self.ends > 1 else grpc.aio.InternalError("gone")
        )


@pytest.mark.parametrize("streams", [False, True])
def test_a_caller_that_has_gone_is_not_answered_twice(
    streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A request may be cancelled by another call and by its own client at once."""
    assert issubclass(cygrpc.ExecuteBatchError, grpc.aio.InternalError)
    from paceline.rpc.codec.status import abort

    async def single(request: Any, context: Any) -> None:
        await abort(context, CancelledError("the client cancelled the request"))

    async def several(request: Any, context: Any) -> Any:
        await single(request, context)
        yield

    kind = "unary_stream" if streams else "unary_unary"
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(several if streams else single)

    async def continuation(details: Any) -> Any:
        return handler

    async def call() -> int:
        class Details:
            method = "/paceline.v1.GenerationService/Generate"

        shielded = await ShieldInterceptor().intercept_service(continuation, Details())  # type: ignore[arg-type]
        context = Context()
        if streams:
            assert [part async for part in shielded.stream_stream(None, context)] == []
        else:
            assert await shielded.stream_unary(None, context) is None
        return context.ends

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(call()) == 1
    assert not caplog.records
