"""The calls of one synchronous client: each goes to one of its coordinators."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from paceline.client.abandoning import Abandoning
from paceline.client.channel import translated
from paceline.client.coordinators import Coordinators
from paceline.client.links import CANCEL_SECONDS, Metadata, SyncLink
from paceline.client.reaching import Reach
from paceline.client.requests import checked_timeout
from paceline.client.trying import UnaryTries
from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.core.security.tls import Tls
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

CLOSE_SECONDS = 5.0
"""Time limit for gRPC to close a channel, which normally takes milliseconds."""


class SyncCalls:
    """Makes calls and cancels abandoned requests. Threads may share it."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None, metadata: Metadata) -> None:
        """`addresses` are checked ones. Connects with the first call."""
        self.address = ",".join(addresses)
        self.coordinators = Coordinators(addresses, lambda host, name: SyncLink.to(host, name, tls, metadata))
        self.abandoning = Abandoning()
        self._secure = tls is not None
        self._closed = False

    def choose(self, tried: set[str], timeout: float | None, broken: SyncLink | None = None) -> SyncLink:
        """The connection for the next call. Waits for the addresses of names if none is known."""
        first = self.coordinators.ask_first()
        if first and concurrent.futures.wait(first, timeout).not_done:
            raise DeadlineExceededError("the timeout expired before the host name was resolved")
        return self.coordinators.choose(tried, broken)

    def told(self, error: PacelineError, link: SyncLink | None) -> PacelineError:
        """The error with a clear message if no server could be reached; `link` is of the last try."""
        address = self.address if link is None else link.address
        return Reach(address, self._secure, self.coordinators.count).told(error)

    def unary(
        self,
        method: Callable[[GenerationServiceStub], grpc.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        """Ask each coordinator once, until one answers. `timeout` is in seconds. Raises PacelineError."""
        tries = UnaryTries[SyncLink](checked_timeout(timeout))
        while True:
            link = None
            try:
                link = self.choose(tries.tried, tries.timeout, tries.broken)
                with translated():
                    answer = method(link.stub)(request, timeout=tries.timeout, metadata=link.metadata)
            except PacelineError as error:
                end = tries.end_after(error, link, self.coordinators.count, closed=self._closed)
                if end is not None:
                    raise self.told(end, link) from error
                self.coordinators.ask()
            else:
                self.coordinators.answered(link)
                return answer

    def begin_close(self) -> None:
        """Calls that end from now on were ended by the caller."""
        self._closed = True

    def close(self) -> None:
        """Send pending cancellations and close the connections. Idempotent."""
        self.abandoning.close(CANCEL_SECONDS)
        # A Ctrl-C during the first call can leave gRPC without the thread that ends its calls. Closing then
        # blocks for ever.
        links = self.coordinators.close()
        closing = threading.Thread(target=_close_all, args=(links,), name="paceline-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _close_all(links: Sequence[SyncLink]) -> None:
    for link in links:
        link.channel.close()
