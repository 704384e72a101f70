"""The synchronous client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from paceline.client import requests
from paceline.client.abandoning import Abandoning
from paceline.client.channel import (
    CHANNEL_OPTIONS,
    CLOSED,
    CallCutError,
    ClientClosedError,
    Contact,
    call_metadata,
    checked_tls,
    cut_by,
    translated,
)
from paceline.client.chatting import Chatting
from paceline.client.reaching import Reach, checked_address
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.resuming import CANCEL_SECONDS, DEFAULT_RESUME_SECONDS, ResumeBackoff, Resuming
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.core.errors import CancelledError, PacelineError, UnavailableError
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import open_channel
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

    A broken stream is resumed without losing a chunk. The same holds if the caller continues reading after a
    Ctrl-C during the wait for a chunk.
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
        self._call = client._generate(resuming.request, resuming.timeout)

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
                self._call_again(pause)
            except PacelineError as end:
                error = end
            except BaseException:
                self._interrupted = True
                raise
            else:
                return
        error = self._client._reach.told(cut_by(error, closed=self._closed.is_set()))
        self.close()
        self._assembler.fail(error)

    def _leave_interrupted_call(self) -> None:
        """Resume without a pause, since the server is healthy. Raises PacelineError."""
        if self._assembler_interrupted or not self._resuming.may_go_on:
            raise CancelledError(INTERRUPTED)
        self._call_again(0.0)

    def _call_again(self, pause: float) -> None:
        """Resume after a pause. Raises PacelineError."""
        if self._closed.wait(pause):
            raise CancelledError(CLOSED)
        self._call.cancel()
        try:
            self._call = self._client._generate(self._resuming.next_request(), self._resuming.timeout)
        except ClientClosedError:
            raise CancelledError(CLOSED) from None
        self._interrupted = False
        if self._closed.is_set():
            # Closed while the call was made: the resumption may have reached the server last, so cancel
            # again.
            self._call.cancel()
            self._client._abandoning.now(self._resuming.request.request_id)
            raise CancelledError(CLOSED)

    def close(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._over = True
        self._abort()

    def _abort(self) -> None:
        """End the stream from another thread and wake its reader."""
        self._closed.set()
        self._leave(self._client._abandoning.now)

    def _leave(self, abandon: Callable[[str], None]) -> None:
        # The call first: the server must learn last that the stream will not be resumed.
        self._call.cancel()
        request_id = self._resuming.abandon()
        if request_id is not None:
            abandon(request_id)

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
    """Talks to one coordinator. Threads may share it.

    Methods raise errors of `paceline.core.errors`: InvalidArgumentError naming the field,
    DeadlineExceededError after `timeout` seconds (None: no deadline), UnavailableError without a server.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        resume_seconds: float = DEFAULT_RESUME_SECONDS,
    ) -> None:
        """`address` is host:port, or a host alone for port 50151. Connects with the first call.

        `tls` None is plain text, `Tls()` trusts the system's authorities. `api_key` is sent with every call.
        A broken stream is resumed for up to `resume_seconds` without a server since its last chunk; 0
        disables resuming. Raises InvalidArgumentError naming the argument or the unusable TLS file.
        """
        self.address = checked_address(address)
        self._reach = Reach(self.address, secure=tls is not None)
        self._metadata = metadata = call_metadata(api_key)
        self._backoff = ResumeBackoff(requests.checked_resume_seconds(resume_seconds))
        self._contact = Contact()
        self._channel = open_channel(self.address, CHANNEL_OPTIONS, checked_tls(tls))
        self._stub = stub = GenerationServiceStub(self._channel)
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()
        """Guards `_streams` and `_closed`: `close` ends a stream, or the stream finds the client closed."""
        self._abandoning = Abandoning(
            lambda name: stub.Cancel.future(
                generation_pb2.CancelRequest(request_id=name), timeout=CANCEL_SECONDS, metadata=metadata
            )
        )

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
        stream = GenerationStream(self, Resuming(request, deadline, self._backoff, contact=self._contact))
        with self._lock:
            closed = self._closed
            if not closed:
                self._streams.add(stream)
        if closed:
            stream.close()
            raise ClientClosedError("this client is closed")
        return stream

    def _generate(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> _Call:
        with translated():
            return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)

    def _apply_chat_template(
        self, request: generation_pb2.ApplyChatTemplateRequest, timeout: float | None
    ) -> generation_pb2.ApplyChatTemplateResponse:
        return self._unary(self._stub.ApplyChatTemplate, request, timeout)

    def tokenize(self, text: str, *, timeout: float | None = None) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = self._unary(self._stub.Tokenize, requests.tokenize_request(text), timeout)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return self._unary(self._stub.Detokenize, request, timeout).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(self._unary(self._stub.ListModels, request, timeout))

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """The status of the coordinator and its workers."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(self._unary(self._stub.GetStatus, request, timeout))

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        deadline = requests.checked_timeout(timeout)
        try:
            with translated():
                answer = method(request, timeout=deadline, metadata=self._metadata)
        except CallCutError as error:
            raise cut_by(error, closed=self._closed) from error
        except UnavailableError as error:
            raise self._reach.told(error) from error
        self._contact.made = True
        return answer

    def close(self) -> None:
        """Cancel running calls and close the connection. Idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream._abort()
        self._abandoning.close(CANCEL_SECONDS)
        # A Ctrl-C during the first call can leave gRPC without the thread that ends its calls. Closing then
        # blocks for ever.
        closing = threading.Thread(target=self._channel.close, name="paceline-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
