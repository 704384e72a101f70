"""The asyncio client: the interface of the synchronous client, on grpc.aio."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from paceline.client import requests
from paceline.client.async_calls import AsyncCalls
from paceline.client.async_stream import AsyncGenerationStream
from paceline.client.channel import call_metadata, checked_tls
from paceline.client.chatting import AsyncChatting
from paceline.client.reaching import Addresses, checked_addresses
from paceline.client.results import GenerationResult
from paceline.client.resuming import DEFAULT_RESUME_SECONDS, ResumeBackoff, Resuming
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.core.security.tls import Tls
from paceline.v1 import generation_pb2


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
        self._backoff = ResumeBackoff(requests.checked_resume_seconds(resume_seconds))
        self._calls = AsyncCalls(addresses, checked_tls(tls), call_metadata(api_key))
        self.address = self._calls.address
        """As given, with ports; several are separated by commas."""
        self._streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()

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
        resuming = Resuming(request, deadline, self._backoff, coordinators=self._calls.coordinators)
        stream = AsyncGenerationStream(self._calls, resuming)
        self._streams.add(stream)
        return stream

    async def _apply_chat_template(
        self,
        request: generation_pb2.ApplyChatTemplateRequest,
        timeout: float | None,  # noqa: ASYNC109
    ) -> generation_pb2.ApplyChatTemplateResponse:
        return await self._calls.unary(lambda stub: stub.ApplyChatTemplate, request, timeout)

    async def tokenize(
        self,
        text: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = await self._calls.unary(
            lambda stub: stub.Tokenize, requests.tokenize_request(text), timeout
        )
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return (await self._calls.unary(lambda stub: stub.Detokenize, request, timeout)).text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:  # noqa: ASYNC109
        """The models that the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(await self._calls.unary(lambda stub: stub.ListModels, request, timeout))

    async def status(self, *, timeout: float | None = None) -> ServerStatus:  # noqa: ASYNC109
        """The status of the coordinator and its workers."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(await self._calls.unary(lambda stub: stub.GetStatus, request, timeout))

    async def close(self) -> None:
        """Cancel running calls and close the connections. Idempotent.

        Afterwards the client only sends cancellations of closed streams. The connections are closed even if
        this coroutine is cancelled.
        """
        self._calls.begin_close()
        try:
            for stream in list(self._streams):
                stream._abort()
        finally:
            await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
