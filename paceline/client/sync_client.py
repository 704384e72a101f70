"""The synchronous client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from paceline.client import requests
from paceline.client.channel import ClientClosedError, call_metadata, checked_tls
from paceline.client.chatting import Chatting
from paceline.client.reaching import Addresses, checked_addresses
from paceline.client.results import GenerationResult
from paceline.client.resuming import DEFAULT_RESUME_SECONDS, ResumeBackoff, Resuming
from paceline.client.server_status import Model, ServerStatus, models_from_proto, status_from_proto
from paceline.client.sync_calls import SyncCalls
from paceline.client.sync_stream import GenerationStream
from paceline.core.errors import UnavailableError
from paceline.core.security.tls import Tls
from paceline.v1 import generation_pb2


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
        self._backoff = ResumeBackoff(requests.checked_resume_seconds(resume_seconds))
        self._calls = SyncCalls(addresses, checked_tls(tls), call_metadata(api_key))
        self.address = self._calls.address
        """As given, with ports; several are separated by commas."""
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()
        """Guards `_streams` and `_closed`: `close` ends a stream, or the stream finds the client closed."""

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
            self._calls.abandoning.start()
            self._calls.abandoning.before_a_request()
        resuming = Resuming(request, deadline, self._backoff, coordinators=self._calls.coordinators)
        try:
            stream = GenerationStream(self._calls, resuming)
        except UnavailableError as error:
            raise self._calls.told(error, None) from error
        with self._lock:
            closed = self._closed
            if not closed:
                self._streams.add(stream)
        if closed:
            stream.close()
            raise ClientClosedError("this client is closed")
        return stream

    def _apply_chat_template(
        self, request: generation_pb2.ApplyChatTemplateRequest, timeout: float | None
    ) -> generation_pb2.ApplyChatTemplateResponse:
        return self._calls.unary(lambda stub: stub.ApplyChatTemplate, request, timeout)

    def tokenize(self, text: str, *, timeout: float | None = None) -> tuple[int, ...]:
        """The target's token ids of `text`."""
        response = self._calls.unary(lambda stub: stub.Tokenize, requests.tokenize_request(text), timeout)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of `token_ids`."""
        request = requests.detokenize_request(token_ids)
        return self._calls.unary(lambda stub: stub.Detokenize, request, timeout).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the server offers."""
        request = generation_pb2.ListModelsRequest()
        return models_from_proto(self._calls.unary(lambda stub: stub.ListModels, request, timeout))

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """The status of the coordinator and its workers."""
        request = generation_pb2.GetStatusRequest()
        return status_from_proto(self._calls.unary(lambda stub: stub.GetStatus, request, timeout))

    def close(self) -> None:
        """Cancel running calls and close the connections. Idempotent."""
        self._calls.begin_close()
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream._abort()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
