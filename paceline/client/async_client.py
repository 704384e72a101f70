"""The asyncio client: the synchronous one's shape over grpc.aio."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from paceline.client import requests
from paceline.client.assembler import StreamAssembler
from paceline.client.channel import call_metadata, channel_options, checked_tls, translated
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.tls import Tls
from paceline.rpc.credentials import open_aio_channel
from paceline.v1 import generation_pb2
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncGenerationStream:
    """Chunks of one generation as they arrive. Closing it, or dropping it, cancels the generation."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
        request: generation_pb2.GenerateRequest,
    ) -> None:
        self._call = call
        self._messages = aiter(call)
        self._assembler = StreamAssembler(request.sampling)
        self._over = False

    @property
    def request_id(self) -> str | None:
        """As the server confirmed or chose it; None before its first message."""
        return self._assembler.request_id

    @property
    def result(self) -> GenerationResult | None:
        """The whole generation, once the last chunk has come."""
        return self._assembler.result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        """Wait for the next chunk. Raises PacelineError."""
        while not self._over:
            try:
                with translated():
                    message = await anext(self._messages, None)
                chunk = self._assembler.feed(message)
            except PacelineError as error:
                await self.aclose()
                self._assembler.fail(error)
                break
            self._over = message is None
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._over = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The call refers to itself, so dropping it would wait for the garbage collector.
        self._call.cancel()


class AsyncClient:
    """Talks to one coordinator, within one event loop. Errors are those of `Client`."""

    def __init__(self, address: str, *, tls: Tls | None = None, api_key: str | None = None) -> None:
        """`address` is host:port. Connects with the first call, and belongs to that call's event loop.

        `tls` None is plain text, `Tls()` trusts the system's authorities. `api_key` goes with every call.
        Raises InvalidArgumentError naming the argument, or the TLS file that cannot be used.
        """
        self.address = requests.checked_address(address)
        self._metadata = call_metadata(api_key)
        self._tls = checked_tls(tls)
        self._channel: grpc.aio.Channel | None = None
        self._stub: GenerationServiceAsyncStub | None = None
        self._closed = False

    def _service(self) -> GenerationServiceAsyncStub:
        if self._closed:
            raise UnavailableError("this client is closed")
        if self._stub is None:
            self._channel = open_aio_channel(self.address, channel_options(self.address), self._tls)
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
        """Generate to the end. `prompt` is text or token ids; parameters are objects or dictionaries."""
        stream = self.stream(
            prompt,
            sampling,
            speculation=speculation,
            request_id=request_id,
            cache_salt=cache_salt,
            timeout=timeout,
        )
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
        """Start generating, and iterate over chunks as they arrive. `timeout` is for the whole stream.

        Not a coroutine: `async for chunk in client.stream(...)`.
        """
        request = requests.generate_request(prompt, sampling, speculation, request_id, cache_salt)
        deadline = requests.checked_timeout(timeout)
        service = self._service()
        with translated():
            return AsyncGenerationStream(
                service.Generate(request, timeout=deadline, metadata=self._metadata), request
            )

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
        """What the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(await self._unary(self._service().ListModels, request, timeout))

    async def status(self, *, timeout: float | None = None) -> ServerStatus:  # noqa: ASYNC109
        """The coordinator's and its workers' state."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(await self._unary(self._service().GetStatus, request, timeout))

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,  # noqa: ASYNC109
    ) -> _Response:
        deadline = requests.checked_timeout(timeout)
        with translated():
            return await method(request, timeout=deadline, metadata=self._metadata)

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled. May be repeated."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
