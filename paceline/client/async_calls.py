"""The calls of one asyncio client: each goes to one of its coordinators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from paceline.client.channel import ClientClosedError, readable, translated
from paceline.client.coordinators import Coordinators
from paceline.client.links import CANCEL_SECONDS, AsyncLink, Metadata
from paceline.client.reaching import Reach
from paceline.client.requests import checked_timeout
from paceline.client.trying import UnaryTries
from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.core.security.tls import Tls

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncCalls:
    """Makes calls and cancels abandoned requests, within the event loop of its first call."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None, metadata: Metadata) -> None:
        """`addresses` are checked ones. Connects with the first call."""
        self.address = ",".join(addresses)
        self.coordinators = Coordinators(
            addresses, lambda host, name: AsyncLink.to(host, name, tls, metadata)
        )
        self._secure = tls is not None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancels: set[asyncio.Task[None]] = set()
        self._closed = False

    async def find(self, timeout: float | None) -> None:  # noqa: ASYNC109
        """Wait for the addresses of names if none is known."""
        first = [asyncio.wrap_future(each) for each in self.coordinators.ask_first()]
        if first and (await asyncio.wait(first, timeout=timeout))[1]:
            raise DeadlineExceededError("the timeout expired before the host name was resolved")

    def choose(self, tried: set[str], broken: AsyncLink | None = None) -> AsyncLink:
        """The connection for the next call. Raises UnavailableError if no coordinator is known."""
        if self._closed:
            raise ClientClosedError("this client is closed")
        # First, because it fails outside an event loop, and nothing must be created then.
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        return self.coordinators.choose(tried, broken)

    def told(self, error: PacelineError, link: AsyncLink | None) -> PacelineError:
        """The error with a clear message if no server could be reached; `link` is of the last try."""
        address = self.address if link is None else link.address
        return Reach(address, self._secure, self.coordinators.count).told(error)

    def abandon(self, link: AsyncLink, request_id: str) -> None:
        """Tell the server that this request will not be resumed there."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # no event loop any more: the server's own time limit applies
        if loop is not self._loop:
            return
        with contextlib.suppress(grpc.aio.UsageError):  # the connection is closed
            # Started here rather than in the task, so that it precedes any later call of this client.
            task = loop.create_task(_answered(link.cancel(request_id)))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def unary(
        self,
        method: Callable[[GenerationServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout: float | None,  # noqa: ASYNC109
    ) -> _Response:
        """Ask each coordinator once, until one answers. `timeout` is in seconds. Raises PacelineError."""
        tries = UnaryTries[AsyncLink](checked_timeout(timeout))
        while True:
            link = None
            try:
                await self.find(tries.timeout)
                link = self.choose(tries.tried, tries.broken)
                with translated():
                    call = method(link.stub)(request, timeout=tries.timeout, metadata=link.metadata)
                    answer = readable(await call)
            except PacelineError as error:
                end = tries.end_after(error, link, self.coordinators.count, closed=self._closed)
                if end is not None:
                    raise self.told(end, link) from error
                self.coordinators.ask()
            else:
                self.coordinators.answered(link)
                return answer

    def begin_close(self) -> None:
        """Make no more calls but cancellations."""
        self._closed = True

    async def close(self) -> None:
        """Send pending cancellations and close the connections, even if this coroutine is cancelled."""
        try:
            if self._cancels:
                await asyncio.wait(self._cancels, timeout=CANCEL_SECONDS)
        finally:
            for task in list(self._cancels):
                task.cancel()
            await asyncio.gather(*(link.channel.close() for link in self.coordinators.close()))


async def _answered(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> None:
    """Wait for the answer and ignore it: the server's own time limit applies."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
        await call
