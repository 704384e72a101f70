"""The synchronous client."""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from paceline.client import requests
from paceline.client.abandoning import Abandoning, Cancel
from paceline.client.channel import (
    CLOSED,
    ClientClosedError,
    call_metadata,
    checked_tls,
    cut_by,
    translated,
)
from paceline.client.chatting import Chatting
from paceline.client.coordinators import Coordinators
from paceline.client.links import CANCEL_SECONDS, SyncLink
from paceline.client.reaching import Addresses, Reach, checked_addresses
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.resuming import DEFAULT_RESUME_SECONDS, ResumeBackoff, Resuming
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.client.trying import UnaryTries
from paceline.core.errors import CancelledError, DeadlineExceededError, PacelineError, UnavailableError
from paceline.core.security.tls import Tls
from paceline.v1 import generation_pb2
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


CLOSE_SECONDS = 5.0
"""Time limit for gRPC to close a channel, which normally takes milliseconds."""
INTERRUPTED = "reading the stream was interrupted by an exception, and the stream cannot be resumed"
"""Error of a stream that is read again after a Ctrl-C or another exception from a signal handler."""


class _Call(Iterator[generation_pb2.GenerateResponse], Protocol):
    def cancel(self) -> bool: ...


class GenerationStream:
    """Chunks of one generation as they arrive. Closing or dropping the stream cancels the generation.

    A broken stream is resumed without losing a chunk, at another coordinator if there is one. The same holds
    if the caller continues reading after a Ctrl-C during the wait for a chunk.
    """

    def __init__(self, client: Client, resuming: Resuming) -> None:
        self._client = client
        self._resuming = resuming
        self._assembler = resuming.assembler
        self._over = False
        self._interrupted = False
        """An exception interrupted reading the call: gRPC would still wait for a message and lose it."""
        self._assembler_interrupted = False
        """The exception interrupted the assembler, which may hold half a message."""
        self._closed = threading.Event()
        self._link = client._choose(resuming.tried, resuming.timeout)
        self._call: _Call = self._link.generate(resuming.request, resuming.timeout)

    @property
    def request_id(self) -> str | None:
        """The id confirmed or chosen by the server; None before its first message."""
        return self._assembler.request_id

    @property
    def result(self) -> GenerationResult | None:
        """The complete result after the last chunk."""
        return self._assembler.result

    @property
    def num_resumes(self) -> int:
        """Number of times the stream was resumed."""
        return self._resuming.num_resumes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationChunk:
        """Wait for the next chunk. Raises PacelineError."""
        while not self._over:
            taking = False
            try:
                if self._interrupted:
                    self._leave_interrupted_call()
                with translated():
                    message = next(self._call, None)
                taking = True
                if message is not None:
                    self._client._coordinators.answered(self._link)
                chunk = self._resuming.feed(message)
            except PacelineError as error:
                self._resume_or_raise(error)
                continue
            except BaseException:
                self._interrupted, self._assembler_interrupted = True, self._assembler_interrupted or taking
                raise
            self._over = message is None
            if chunk is not None:
                return chunk
        raise StopIteration

    def _resume_or_raise(self, error: PacelineError) -> None:
        """Resume, or raise the final error unless the stream is complete."""
        pause = self._resuming.pause_after(error)
        if pause is not None:
            try:
                self._client._coordinators.ask()
                self._call_again(pause)
            except PacelineError as end:
                error = end
            except BaseException:
                self._interrupted = True
                raise
            else:
                return
        error = self._client._told(cut_by(error, closed=self._closed.is_set()), self._link)
        self.close()
        self._assembler.fail(error)

    def _leave_interrupted_call(self) -> None:
        """Resume at once where the request is, since that server is healthy. Raises PacelineError."""
        if self._assembler_interrupted or not self._resuming.may_go_on:
            raise CancelledError(INTERRUPTED)
        self._call_at(lambda: self._link, 0.0)

    def _call_again(self, pause: float) -> None:
        """Resume after a pause, at another coordinator if there is one. Raises PacelineError."""
        before, resuming = self._link, self._resuming
        self._call_at(lambda: self._client._choose(resuming.tried, resuming.timeout, before), pause)
        held_as = resuming.held_as
        if self._link is not before and held_as is not None:
            # If only the connection broke, that coordinator still holds the request.
            self._client._abandoning.now(partial(before.cancel, held_as))

    def _call_at(self, choose: Callable[[], SyncLink], pause: float) -> None:
        if self._closed.wait(pause):
            raise CancelledError(CLOSED)
        self._call.cancel()
        try:
            request, link = self._resuming.next_request(), choose()
            self._call = link.generate(request, self._resuming.timeout)
        except ClientClosedError:
            raise CancelledError(CLOSED) from None
        self._link = link
        self._interrupted = False
        if self._closed.is_set():
            # Closed while the call was made: the resumption may have reached the server last, so cancel
            # again.
            self._call.cancel()
            self._client._abandoning.now(partial(link.cancel, self._resuming.request.request_id))
            raise CancelledError(CLOSED)

    def close(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._over = True
        self._abort()

    def _abort(self) -> None:
        """End the stream from another thread and wake its reader."""
        self._closed.set()
        self._leave(self._client._abandoning.now)

    def _leave(self, abandon: Callable[[Cancel], None]) -> None:
        # The call first: the server must learn last that the stream will not be resumed.
        self._call.cancel()
        request_id = self._resuming.abandon()
        if request_id is not None:
            abandon(partial(self._link.cancel, request_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._leave(self._client._abandoning.soon)


class Client(Chatting[GenerationStream]):
    """Talks to one coordinator, or to several that serve the same model. Threads may share it.

    Methods raise errors of `paceline.core.errors`: InvalidArgumentError naming the field,
    DeadlineExceededError after `timeout` seconds (None: no deadline), UnavailableError without a server.
    """

    def __init__(
        self,
        address: Addresses,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        resume_seconds: float = DEFAULT_RESUME_SECONDS,
    ) -> None:
        """`address` is host:port, or a host alone for port 50151. Connects with the first call.

        Several coordinators are given as a list, in one text separated by commas, or as dns:host:port, which
        stands for every address of the name. Calls begin at them in turn; a broken stream goes on at another.

        `tls` None is plain text, `Tls()` trusts the system's authorities. `api_key` is sent with every call.
        A broken stream is resumed for up to `resume_seconds` without a server since its last chunk; 0
        disables resuming. Raises InvalidArgumentError naming the argument or the unusable TLS file.
        """
        addresses = checked_addresses(address)
        self.address = ",".join(addresses)
        """As given, with ports; several are separated by commas."""
        self._tls = checked_tls(tls)
        metadata = call_metadata(api_key)
        self._backoff = ResumeBackoff(requests.checked_resume_seconds(resume_seconds))
        self._coordinators = Coordinators(
            addresses, lambda host, name: SyncLink.to(host, name, tls, metadata)
        )
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()
        """Guards `_streams` and `_closed`: `close` ends a stream, or the stream finds the client closed."""
        self._abandoning = Abandoning()

    def generate(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> GenerationResult:
        """Generate to the end. `prompt` is text or token ids; parameters may be dictionaries."""
        stream = self.stream(
            prompt,
            sampling,
            speculation=speculation,
            request_id=request_id,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        for _ in stream:
            pass
        return stream._assembler.require_result()

    def stream(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> GenerationStream:
        """Start generating and iterate over chunks as they arrive. `timeout` covers the whole stream."""
        request = requests.generate_request(prompt, sampling, speculation, request_id, cache_salt)
        deadline = requests.checked_timeout(timeout)
        if self._backoff.seconds:
            self._abandoning.start()
            self._abandoning.before_a_request()
        coordinators = self._coordinators
        resuming = Resuming(
            request,
            deadline,
            self._backoff,
            contact=coordinators.contact,
            count=lambda: coordinators.count,
        )
        try:
            stream = GenerationStream(self, resuming)
        except UnavailableError as error:
            raise self._told(error, None) from error
        with self._lock:
            closed = self._closed
            if not closed:
                self._streams.add(stream)
        if closed:
            stream.close()
            raise ClientClosedError("this client is closed")
        return stream

    def _choose(self, tried: set[str], timeout: float | None, broken: SyncLink | None = None) -> SyncLink:
        """The connection for the next call. Waits for the addresses of names if none is known."""
        first = self._coordinators.ask_first()
        if first and concurrent.futures.wait(first, timeout).not_done:
            raise DeadlineExceededError("the timeout expired before the host name was resolved")
        return self._coordinators.choose(tried, broken)

    def _told(self, error: PacelineError, link: SyncLink | None) -> PacelineError:
        address = self.address if link is None else link.address
        return Reach(address, self._tls is not None, self._coordinators.count).told(error)

    def _apply_chat_template(
        self, request: generation_pb2.ApplyChatTemplateRequest, timeout: float | None
    ) -> generation_pb2.ApplyChatTemplateResponse:
        return self._unary(lambda stub: stub.ApplyChatTemplate, request, timeout)

    def tokenize(self, text: str, *, timeout: float | None = None) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = self._unary(lambda stub: stub.Tokenize, requests.tokenize_request(text), timeout)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return self._unary(lambda stub: stub.Detokenize, request, timeout).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(self._unary(lambda stub: stub.ListModels, request, timeout))

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """The status of the coordinator and its workers."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(self._unary(lambda stub: stub.GetStatus, request, timeout))

    def _unary(
        self,
        method: Callable[[GenerationServiceStub], grpc.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        """Ask each coordinator once, until one answers."""
        tries = UnaryTries[SyncLink](requests.checked_timeout(timeout))
        while True:
            link = None
            try:
                link = self._choose(tries.tried, tries.timeout, tries.broken)
                with translated():
                    answer = method(link.stub)(request, timeout=tries.timeout, metadata=link.metadata)
            except PacelineError as error:
                end = tries.end_after(error, link, self._coordinators.count, closed=self._closed)
                if end is not None:
                    raise self._told(end, link) from error
                self._coordinators.ask()
            else:
                self._coordinators.answered(link)
                return answer

    def close(self) -> None:
        """Cancel running calls and close the connections. Idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream._abort()
        self._abandoning.close(CANCEL_SECONDS)
        # A Ctrl-C during the first call can leave gRPC without the thread that ends its calls. Closing then
        # blocks for ever.
        links = self._coordinators.close()
        closing = threading.Thread(target=_close_all, args=(links,), name="paceline-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_all(links: Sequence[SyncLink]) -> None:
    for link in links:
        link.channel.close()
