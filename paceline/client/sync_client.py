"""The synchronous client: requests out, answers in, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from paceline.client import requests
from paceline.client.assembler import StreamAssembler
from paceline.client.channel import call_metadata, channel_options, checked_tls, translated
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.core.errors import PacelineError
from paceline.core.tls import Tls
from paceline.rpc.credentials import open_channel
from paceline.v1 import generation_pb2
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Call(Iterator[generation_pb2.GenerateResponse], Protocol):
    def cancel(self) -> bool: ...


class GenerationStream:
    """Chunks of one generation as they arrive. Closing it, or dropping it, cancels the generation."""

    def __init__(self, call: _Call, request: generation_pb2.GenerateRequest) -> None:
        self._call = call
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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationChunk:
        """Wait for the next chunk. Raises PacelineError."""
        while not self._over:
            try:
                with translated():
                    message = next(self._call, None)
                chunk = self._assembler.feed(message)
            except PacelineError as error:
                self.close()
                self._assembler.fail(error)
                break
            self._over = message is None
            if chunk is not None:
                return chunk
        raise StopIteration

    def close(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._over = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """Talks to one coordinator. Threads may share it.

    Every method raises an error of `paceline.errors`: InvalidArgumentError naming the field,
    DeadlineExceededError after `timeout` seconds (None: no deadline), UnavailableError without a server.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, api_key: str | None = None) -> None:
        """`address` is host:port. Connects with the first call.

        `tls` None is plain text, `Tls()` trusts the system's authorities. `api_key` goes with every call.
        Raises InvalidArgumentError naming the argument, or the TLS file that cannot be used.
        """
        self.address = requests.checked_address(address)
        self._metadata = call_metadata(api_key)
        self._channel = open_channel(self.address, channel_options(self.address), checked_tls(tls))
        self._stub = GenerationServiceStub(self._channel)

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
        """Generate to the end. `prompt` is text or token ids; parameters are objects or dictionaries."""
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
        """Start generating, and iterate over chunks as they arrive. `timeout` is for the whole stream."""
        request = requests.generate_request(prompt, sampling, speculation, request_id, cache_salt)
        deadline = requests.checked_timeout(timeout)
        with translated():
            return GenerationStream(
                self._stub.Generate(request, timeout=deadline, metadata=self._metadata), request
            )

    def tokenize(self, text: str, *, timeout: float | None = None) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = self._unary(self._stub.Tokenize, requests.tokenize_request(text), timeout)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return self._unary(self._stub.Detokenize, request, timeout).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """What the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(self._unary(self._stub.ListModels, request, timeout))

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """The coordinator's and its workers' state."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(self._unary(self._stub.GetStatus, request, timeout))

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        deadline = requests.checked_timeout(timeout)
        with translated():
            return method(request, timeout=deadline, metadata=self._metadata)

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled. May be repeated."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
