"""The answer of a generating endpoint: complete, or as server-sent events. A disconnect stops the work.

The status line waits for the first token, even if the prompt is reported before it, so that an error until
then has its own status. A later error is the last event of the stream. Only a complete stream ends with
`[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coordinator.api.http.openai.generations import generating, merged_parts
from coordinator.api.http.openai.schema.parameters import GenerationRequest
from coordinator.api.http.openai.usage import usage, usage_so_far
from coordinator.api.http.server import encoding
from coordinator.api.http.server.errors import HttpError, from_error
from coordinator.app import Coordinator
from coordinator.auth import principal
from coordinator.requests.generation import Generation
from coordinator.sequence.ledger import Commit, Finish
from coordinator.telemetry import call_log
from paceline.core.errors import CancelledError, PacelineError
from paceline.core.types import FinishReason
from paceline.rpc.codec import GenerateCall

log = logging.getLogger(__name__)


class CutError(Exception):
    """The work was ended from elsewhere while its client was connected."""


class Wording(Protocol):
    """Turns commits into an endpoint's JSON objects."""

    def opening(self) -> Sequence[dict[str, Any]]:
        """The events before the first commit."""

    def chunks(self, choice: int, commit: Commit) -> Sequence[dict[str, Any]]:
        """The events for one commit, in order; none if the commit has nothing to show."""

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The event after all choices have ended, if the request asks for it."""

    def whole(self, choices: Sequence[Sequence[Commit]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An ASGI application that runs the calls of one request and sends their answer."""

    coordinator: Coordinator
    calls: Sequence[GenerateCall]
    wording: Callable[[Sequence[Generation]], Wording]
    request: GenerationRequest
    request_id: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HttpError if nothing was sent yet."""
        if (call := call_log.current.get()) is not None:
            call.name(self.request_id)
        work = self._stream(send) if self.request.stream else self._whole(scope, receive, send)
        try:
            await until_client_leaves(receive, work)
        except CutError:
            # Closing a connection waits for data that its client does not read, so the connection is aborted.
            if (abort := scope.get("state", {}).get(encoding.ABORT_CONNECTION)) is not None:
                abort()
                await _disconnect(receive)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._parts() as (generations, parts):
                wording = self.wording(generations)
                choices: list[list[Commit]] = [[] for each in generations for _ in each.machines]
                async for choice, commit in parts:
                    choices[choice].append(commit)
                content = await asyncio.to_thread(wording.whole, choices, self._usage(generations))
                headers = {"x-request-id": self.request_id}
                took = partial(self.coordinator.took, generations)
                await encoding.JsonResponse(content, headers=headers, took=took)(scope, receive, send)
        except PacelineError as error:
            raise from_error(error, self.request.names) from None

    async def _stream(self, send: Send) -> None:
        begun, told = False, 0
        try:
            async with self._parts() as (generations, parts):
                wording = self.wording(generations)
                held = self._events(wording.opening(), generations, told)
                async for choice, commit in parts:
                    told += len(commit.token_ids)
                    held += self._events(wording.chunks(choice, commit), generations, told)
                    if not begun:
                        if not commit.token_ids and commit.finish is None:
                            continue
                        await send(_start(self.request_id))
                        begun = True
                    if held:
                        await send(_body(b"".join(held)))
                        held.clear()
                last = encoding.DONE
                if self.request.include_usage:
                    last = encoding.event(wording.usage_chunk(self._usage(generations))) + last
                # Before the generations are released: a running stream is drained, not cut.
                await send(_body(last, more=False))
        except Exception as error:
            known = from_error(error, self.request.names)
            if not begun:
                raise (known if isinstance(error, PacelineError | HttpError) else error) from None
            if not isinstance(error, PacelineError):
                log.exception("a stream failed")
            await send(_body(encoding.event(known.body), more=False))

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncIterator[tuple[list[Generation], AsyncIterator[tuple[int, Commit]]]]:
        async with (
            generating(self.coordinator, self.calls) as generations,
            contextlib.aclosing(merged_parts(self.coordinator, generations)) as parts,
        ):
            yield generations, _without_tokens(parts) if self.request.scores_only else parts

    def _events(
        self, chunks: Sequence[dict[str, Any]], generations: Sequence[Generation], told: int
    ) -> list[bytes]:
        """Encode events, with OpenAI's usage field: null, or `told` tokens of all choices so far."""
        more: dict[str, Any] = {"usage": None} if self.request.include_usage else {}
        if chunks and self.request.tells_usage_so_far:
            more["usage"] = usage_so_far(generations, told)
        return [encoding.event(chunk | more) for chunk in chunks]

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        counts = usage(
            generations, include_speculative_decoding=bool(self.request.include_speculative_decoding)
        )
        if self.request.scores_only:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts


async def _without_tokens(
    parts: AsyncIterator[tuple[int, Commit]],
) -> AsyncIterator[tuple[int, Commit]]:
    """The prompt's report and then the end, without the token that came with the report."""
    async for choice, commit in parts:
        if commit.token_ids:
            yield choice, Commit(0, (), (), "", Finish(FinishReason.LENGTH), commit.choice)
        else:
            yield choice, commit


def _start(request_id: str) -> dict[str, Any]:
    headers = encoding.EVENT_STREAM_HEADERS | {"x-request-id": request_id}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


def _body(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def until_named(request: Request, coordinator: Coordinator, *, needs_length: bool = False) -> None:
    """Wait for the first target if only it can give the model's name. Call after reading the body.

    The request also waits if it `needs_length`, the model's maximum length.

    Raises UnavailableError if no target comes in time, CancelledError if the client goes away, and
    ResourceExhaustedError if the limit of its key is reached.
    """
    if coordinator.has_target if needs_length else coordinator.known_name:
        return
    # A waiting request holds a body. It counts as one sequence until the number of its sequences is known.
    with coordinator.gate.holding(principal.get(), 1):
        if not await until_client_leaves(request.receive, coordinator.wait_for_target()):
            raise CancelledError("the client went away")


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work until the client leaves. Call after reading the request's body.

    Returns True if the work was done. Raises CutError.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        stays = not leaving.done()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
    if working.cancelled():
        if stays:
            raise CutError
        return False
    working.result()
    return True


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
