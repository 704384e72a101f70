"""The asyncio client: the interface of the synchronous client, on grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from paceline.client import requests
from paceline.client.channel import (
    CLOSED,
    ClientClosedError,
    call_metadata,
    checked_tls,
    cut_by,
    readable,
    translated,
)
from paceline.client.chatting import AsyncChatting
from paceline.client.coordinators import Coordinators
from paceline.client.links import CANCEL_SECONDS, AsyncLink
from paceline.client.reaching import Addresses, Reach, checked_addresses
from paceline.client.reading import CallMessages
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.resuming import DEFAULT_RESUME_SECONDS, ResumeBackoff, Resuming
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.client.trying import UnaryTries
from paceline.core.errors import CancelledError, DeadlineExceededError, PacelineError
from paceline.core.security.tls import Tls
from paceline.v1 import generation_pb2

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncGenerationStream:
    """Chunks of one generation as they arrive. Closing or dropping the stream cancels the generation.

    A broken stream is resumed without losing a chunk, at another coordinator if there is one. A cancelled
    wait for a chunk does not end the stream: the next wait gets that chunk.
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
        self._link: AsyncLink | None = None
        self._reading: CallMessages | None = None
        if client._knows_a_coordinator:
            self._call(resuming.request)
        else:
            self._pauses_until = 0.0  # the first wait asks for the addresses

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
                    await self._call_again()
                if self._closed.is_set():
                    raise CancelledError(CLOSED)
                assert self._reading is not None
                assert self._link is not None
                message = await self._reading.next()
                if message is not None:
                    self._client._coordinators.answered(self._link)
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
            self._client._coordinators.ask()
            self._pauses_until = asyncio.get_running_loop().time() + pause
            return
        error = self._client._told(cut_by(error, closed=self._closed.is_set()), self._link)
        self._end()
        self._assembler.fail(error)

    async def _call_again(self) -> None:
        """Resume after the pause, which a cancelled wait does not extend."""
        if not self._closed.is_set():
            await self._client._find(self._resuming.timeout)
        self._pauses_until = None
        if self._closed.is_set():
            return
        if self._reading is None:
            self._call(self._resuming.request)
            return
        self._reading.cancel()
        before = self._link
        self._call(self._resuming.next_request())
        held_as = self._resuming.held_as
        if before is not None and before is not self._link and held_as is not None:
            # If only the connection broke, that coordinator still holds the request.
            self._client._abandon(before, held_as)

    def _call(self, request: generation_pb2.GenerateRequest) -> None:
        """Begin a call, at another coordinator than the broken one if there is one."""
        link = self._client._choose(self._resuming.tried, self._link)
        self._reading = CallMessages(link.generate(request, self._resuming.timeout))
        self._link = link

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
        if self._reading is not None:
            self._reading.cancel()
        if self._link is not None and (request_id := self._resuming.abandon()) is not None:
            self._client._abandon(self._link, request_id)

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
    """Talks to one coordinator, or to several that serve the same model, within one event loop. Errors are
    those of `Client`."""

    def __init__(
        self,
        address: Addresses,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        resume_seconds: float = DEFAULT_RESUME_SECONDS,
    ) -> None:
        """`address` is host:port, or a host alone for port 50151.

        Connects with the first call, and belongs to that call's event loop. Several coordinators are given as
        for `Client`. With dns:host:port, streams that are made before its addresses are known begin with the
        first wait for a chunk.

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
            addresses, lambda host, name: AsyncLink.to(host, name, tls, metadata)
        )
        self._streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancels: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def _knows_a_coordinator(self) -> bool:
        return self._coordinators.count > 0

    async def _find(self, timeout: float | None) -> None:  # noqa: ASYNC109
        """Wait for the addresses of names if none is known."""
        first = [asyncio.wrap_future(each) for each in self._coordinators.ask_first()]
        if first and (await asyncio.wait(first, timeout=timeout))[1]:
            raise DeadlineExceededError("the timeout expired before the host name was resolved")

    def _choose(self, tried: set[str], broken: AsyncLink | None = None) -> AsyncLink:
        """The connection for the next call."""
        if self._closed:
            raise ClientClosedError("this client is closed")
        # First, because it fails outside an event loop, and nothing must be created then.
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        return self._coordinators.choose(tried, broken)

    def _told(self, error: PacelineError, link: AsyncLink | None) -> PacelineError:
        address = self.address if link is None else link.address
        return Reach(address, self._tls is not None, self._coordinators.count).told(error)

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
        coordinators = self._coordinators
        resuming = Resuming(
            request,
            deadline,
            self._backoff,
            contact=coordinators.contact,
            count=lambda: coordinators.count,
        )
        stream = AsyncGenerationStream(self, resuming)
        self._streams.add(stream)
        return stream

    def _abandon(self, link: AsyncLink, request_id: str) -> None:
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

    async def _apply_chat_template(
        self,
        request: generation_pb2.ApplyChatTemplateRequest,
        timeout: float | None,  # noqa: ASYNC109
    ) -> generation_pb2.ApplyChatTemplateResponse:
        return await self._unary(lambda stub: stub.ApplyChatTemplate, request, timeout)

    async def tokenize(
        self,
        text: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = await self._unary(lambda stub: stub.Tokenize, requests.tokenize_request(text), timeout)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return (await self._unary(lambda stub: stub.Detokenize, request, timeout)).text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:  # noqa: ASYNC109
        """The models that the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(await self._unary(lambda stub: stub.ListModels, request, timeout))

    async def status(self, *, timeout: float | None = None) -> ServerStatus:  # noqa: ASYNC109
        """The status of the coordinator and its workers."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(await self._unary(lambda stub: stub.GetStatus, request, timeout))

    async def _unary(
        self,
        method: Callable[[GenerationServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout: float | None,  # noqa: ASYNC109
    ) -> _Response:
        """Ask each coordinator once, until one answers."""
        tries = UnaryTries[AsyncLink](requests.checked_timeout(timeout))
        while True:
            link = None
            try:
                await self._find(tries.timeout)
                link = self._choose(tries.tried, tries.broken)
                with translated():
                    call = method(link.stub)(request, timeout=tries.timeout, metadata=link.metadata)
                    answer = readable(await call)
            except PacelineError as error:
                end = tries.end_after(error, link, self._coordinators.count, closed=self._closed)
                if end is not None:
                    raise self._told(end, link) from error
                self._coordinators.ask()
            else:
                self._coordinators.answered(link)
                return answer

    async def close(self) -> None:
        """Cancel running calls and close the connections. Idempotent.

        Afterwards the client only sends cancellations of closed streams. The connections are closed even if
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
            for link in self._coordinators.close():
                await link.channel.close()

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
