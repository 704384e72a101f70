"""The answer of a generating endpoint: whole, or as server-sent events; cut short when its client leaves.

The status line waits for the first token, also where a prompt is told before it, so that whatever goes wrong
until then has a status of its own. What goes wrong later is the last event of the stream. Only a stream that
is whole ends with `[DONE]`.
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
    """The work was ended from elsewhere while its client was there."""


class Wording(Protocol):
    """How an endpoint puts what was generated into OpenAI's words."""

    def opening(self) -> Sequence[dict[str, Any]]:
        """The events before those of any commit."""

    def chunks(self, choice: int, commit: Commit) -> Sequence[dict[str, Any]]:
        """The events for one commit, in order; none where there is nothing to tell."""

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The event after all choices have ended, where the request asks for it."""

    def whole(self, choices: Sequence[Sequence[Commit]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An ASGI application that runs the calls of one request and tells of them."""

    coordinator: Coordinator
    calls: Sequence[GenerateCall]
    wording: Callable[[Sequence[Generation]], Wording]
    request: GenerationRequest
    request_id: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HttpError before anything was sent."""
        if (call := call_log.current.get()) is not None:
            call.name(self.request_id)
        work = self._stream(send) if self.request.stream else self._whole(scope, receive, send)
        try:
            await until_client_leaves(receive, work)
        except CutError:
            # A connection that is merely closed waits for what its client does not read.
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
                # Before the generations are let go: a stream that runs is drained, not cut.
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
        """With the usage as OpenAI has it, still to come, or `told` tokens so far, those of all choices."""
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
    """What is told of the prompt, and then the end: the token that the report came with is left out."""
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
    """Wait for the first target, if only it can say what the model is called. The body has been read before.

    So it is where the request `needs_length`, the model's.

    Raises UnavailableError if none comes in time, CancelledError when the client goes away, and
    ResourceExhaustedError when its key's limit is reached.
    """
    if coordinator.has_target if needs_length else coordinator.known_name:
        return
    # Who waits holds a body. Its sequences are counted once it is known how many they are; until then it
    # is one.
    with coordinator.gate.holding(principal.get(), 1):
        if not await until_client_leaves(request.receive, coordinator.wait_for_target()):
            raise CancelledError("the client went away")


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or the part of it that its client stays for. The request's body has been read before.

    Returns whether the work was done. Raises CutError.
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
