"""The asyncio client: the interface of the synchronous client, on grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from paceline.client import requests
from paceline.client.channel import (
    CHANNEL_OPTIONS,
    CLOSED,
    CallCutError,
    ClientClosedError,
    Contact,
    call_metadata,
    checked_tls,
    cut_by,
    readable,
    translated,
)
from paceline.client.chatting import AsyncChatting
from paceline.client.reaching import Reach, checked_address
from paceline.client.reading import Call, CallMessages
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.resuming import CANCEL_SECONDS, DEFAULT_RESUME_SECONDS, ResumeBackoff, Resuming
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.core.errors import CancelledError, PacelineError, UnavailableError
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import open_aio_channel
from paceline.v1 import generation_pb2
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncGenerationStream:
    """Chunks of one generation as they arrive. Closing or dropping the stream cancels the generation.

    A broken stream is resumed without losing a chunk. A cancelled wait for a chunk does not end the stream:
    the next wait gets that chunk.
    """

    def __init__(self, client: AsyncClient, resuming: Resuming) -> None:
        self._client = client
        self._resuming = resuming
        self._assembler = resuming.assembler
        self._over = False
        self._closed = asyncio.Event()
        self._being_read = False
        self._pauses_until: float | None = None
        """Event loop time at which a broken stream is resumed."""
        self._reading = CallMessages(client._generate(resuming.request, resuming.timeout))

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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        """Wait for the next chunk. Raises PacelineError, or RuntimeError if another task is waiting."""
        if self._being_read:
            raise RuntimeError("another task is reading this stream")
        self._being_read = True
        try:
            chunk = await self._next_chunk()
        except BaseException:
            self._being_read = False
            del self  # the error's traceback must not keep a dropped stream alive
            raise
        self._being_read = False
        return chunk

    async def _next_chunk(self) -> GenerationChunk:
        while not self._over:
            try:
                if self._pauses_until is not None:
                    await _wait_until(self._closed, self._pauses_until)
                    self._call_again()
                if self._closed.is_set():
                    raise CancelledError(CLOSED)
                message = await self._reading.next()
                chunk = self._resuming.feed(message)
            except PacelineError as error:
                self._resume_or_raise(error)
                continue
            except asyncio.CancelledError:
                del self
                raise
            self._over = message is None
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    def _resume_or_raise(self, error: PacelineError) -> None:
        """Begin the pause before resuming, or raise the final error unless the stream is complete."""
        pause = None if self._closed.is_set() else self._resuming.pause_after(error)
        if pause is not None:
            self._pauses_until = asyncio.get_running_loop().time() + pause
            return
        error = self._client._reach.told(cut_by(error, closed=self._closed.is_set()))
        self._end()
        self._assembler.fail(error)

    def _call_again(self) -> None:
        """Resume after the pause, which a cancelled wait does not extend."""
        self._pauses_until = None
        if self._closed.is_set():
            return
        self._reading.cancel()
        self._reading = CallMessages(
            self._client._generate(self._resuming.next_request(), self._resuming.timeout)
        )

    async def aclose(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._end()

    def _end(self) -> None:
        self._over = True
        self._abort()

    def _abort(self) -> None:
        """End the stream from another task and wake its reader."""
        self._closed.set()
        self._leave()

    def _leave(self) -> None:
        # The call first: the server must learn last that the stream will not be resumed.
        self._reading.cancel()
        request_id = self._resuming.abandon()
        if request_id is not None:
            self._client._abandon(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The call is a reference cycle, so dropping it would leave it to the garbage collector.
        if hasattr(self, "_reading"):
            self._leave()


class AsyncClient(AsyncChatting[AsyncGenerationStream]):
    """Talks to one coordinator, within one event loop. Errors are those of `Client`."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        resume_seconds: float = DEFAULT_RESUME_SECONDS,
    ) -> None:
        """`address` is host:port, or a host alone for port 50151.

        Connects with the first call, and belongs to that call's event loop.

        `tls` None is plain text, `Tls()` trusts the system's authorities. `api_key` is sent with every call.
        A broken stream is resumed for up to `resume_seconds` without a server since its last chunk; 0
        disables resuming. Raises InvalidArgumentError naming the argument or the unusable TLS file.
        """
        self.address = checked_address(address)
        self._reach = Reach(self.address, secure=tls is not None)
        self._metadata = call_metadata(api_key)
        self._tls = checked_tls(tls)
        self._backoff = ResumeBackoff(requests.checked_resume_seconds(resume_seconds))
        self._contact = Contact()
        self._streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancels: set[asyncio.Task[None]] = set()
        self._channel: grpc.aio.Channel | None = None
        self._stub: GenerationServiceAsyncStub | None = None
        self._closed = False

    def _service(self) -> GenerationServiceAsyncStub:
        if self._closed:
            raise ClientClosedError("this client is closed")
        if self._stub is None:
            # First, because it fails outside an event loop, and nothing must be created then.
            self._loop = asyncio.get_running_loop()
            self._channel = open_aio_channel(self.address, CHANNEL_OPTIONS, self._tls)
            self._stub = GenerationServiceStub(self._channel)
        return self._stub

    async def generate(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - travels to the server as the call's deadline
    ) -> GenerationResult:
        """Generate to the end. `prompt` is text or token ids; parameters may be dictionaries."""
        async with self.stream(
            prompt,
            sampling,
            speculation=speculation,
            request_id=request_id,
            cache_salt=cache_salt,
            timeout=timeout,
        ) as stream:
            async for _ in stream:
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
    ) -> AsyncGenerationStream:
        """Start generating and iterate over chunks as they arrive. `timeout` covers the whole stream.

        Not a coroutine: `async for chunk in client.stream(...)`.
        """
        request = requests.generate_request(prompt, sampling, speculation, request_id, cache_salt)
        deadline = requests.checked_timeout(timeout)
        resuming = Resuming(request, deadline, self._backoff, contact=self._contact)
        stream = AsyncGenerationStream(self, resuming)
        self._streams.add(stream)
        return stream

    def _generate(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> Call:
        service = self._service()
        with translated():
            return service.Generate(request, timeout=timeout, metadata=self._metadata)

    def _abandon(self, request_id: str) -> None:
        """Tell the server that this request will not be resumed."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # no event loop any more: the server's own time limit applies
        if loop is not self._loop or self._stub is None:
            return
        request = generation_pb2.CancelRequest(request_id=request_id)
        # Started here rather than in the task, so that it precedes any later call of this client.
        call = self._stub.Cancel(request, timeout=CANCEL_SECONDS, metadata=self._metadata)
        task = loop.create_task(_answered(call))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _apply_chat_template(
        self,
        request: generation_pb2.ApplyChatTemplateRequest,
        timeout: float | None,  # noqa: ASYNC109
    ) -> generation_pb2.ApplyChatTemplateResponse:
        return await self._unary(self._service().ApplyChatTemplate, request, timeout)

    async def tokenize(
        self,
        text: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = await self._unary(self._service().Tokenize, requests.tokenize_request(text), timeout)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return (await self._unary(self._service().Detokenize, request, timeout)).text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:  # noqa: ASYNC109
        """The models that the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(await self._unary(self._service().ListModels, request, timeout))

    async def status(self, *, timeout: float | None = None) -> ServerStatus:  # noqa: ASYNC109
        """The status of the coordinator and its workers."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(await self._unary(self._service().GetStatus, request, timeout))

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,  # noqa: ASYNC109
    ) -> _Response:
        deadline = requests.checked_timeout(timeout)
        try:
            with translated():
                answer = readable(await method(request, timeout=deadline, metadata=self._metadata))
        except CallCutError as error:
            raise cut_by(error, closed=self._closed) from error
        except UnavailableError as error:
            raise self._reach.told(error) from error
        self._contact.made = True
        return answer

    async def close(self) -> None:
        """Cancel running calls and close the connection. Idempotent.

        Afterwards the client only sends cancellations of closed streams. The connection is closed even if
        this coroutine is cancelled.
        """
        self._closed = True
        try:
            for stream in list(self._streams):
                stream._abort()
            if self._cancels:
                await asyncio.wait(self._cancels, timeout=CANCEL_SECONDS)
        finally:
            for task in list(self._cancels):
                task.cancel()
            channel, self._channel, self._stub = self._channel, None, None
            if channel is not None:
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _wait_until(event: asyncio.Event, when: float) -> None:
    """Wait for the event until this event loop time at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(when):
            await event.wait()


async def _answered(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> None:
    """Wait for the answer and ignore it: the server's own time limit applies."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
        await call
