"""`paceline chat`: a conversation with the served model, using its chat template."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from paceline.cli.connecting import DEFAULT_ADDRESS, Address, StreamConnection
from paceline.cli.options import Defaults, option, options_from_fields
from paceline.cli.structuring import Structure
from paceline.client import AsyncClient
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.types import SamplingParams, SpeculationParams

PROMPT = "> "
"""Prompt for the user's input, shown only in a terminal."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)


@options_from_fields
def chat(
    sampling: Annotated[SamplingParams, Defaults({"max_tokens": None})],
    speculation: SpeculationParams,
    structure: Structure,
    connection: StreamConnection,
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, option("system", "System message before the conversation.")] = "",
    cache_salt: Annotated[str, option("cache_salt", "Share cached prefixes only with the same salt.")] = "",
) -> None:
    """Talk to the model, one message per line of input. Ctrl-C ends a reply, Ctrl-D the command."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            raise InvalidArgumentError(name, "are not shown in a conversation")
    for name, default in (("n", 1), ("echo", False)):
        if getattr(sampling, name) != default:
            raise InvalidArgumentError(name, "is not available in a conversation")
    loop = _Conversation(structure.of(sampling), speculation, cache_salt, system)
    # One event loop for all replies. During a reply it turns Ctrl-C into a cancellation, because a
    # KeyboardInterrupt inside gRPC could make it hang.
    with asyncio.Runner() as runner:
        client = connection.client(address)
        try:
            runner.run(loop.check(client))
            for line in _lines():
                runner.run(loop.turn(client, line))
        finally:
            runner.run(client.close())
    if loop.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class _Conversation:
    """A conversation and its messages so far."""

    def __init__(
        self, sampling: SamplingParams, speculation: SpeculationParams, cache_salt: str, system: str
    ) -> None:
        self._sampling = sampling
        self._speculation = speculation
        self._cache_salt = cache_salt
        self._messages = [{"role": "system", "content": system}] if system else []
        self.failed = False
        """Whether a reply failed."""

    async def check(self, client: AsyncClient) -> None:
        """Raise the server's error if it cannot render such a conversation (no template, no system role)."""
        await client.apply_chat_template([*self._messages, {"role": "user", "content": "Hello"}])

    async def turn(self, client: AsyncClient, line: str) -> None:
        """Print the reply to one message, until Ctrl-C. The printed part is kept in the conversation."""
        self._messages.append({"role": "user", "content": line})
        reply = ""
        try:
            async with await client.stream_chat(
                self._messages,
                self._sampling,
                speculation=self._speculation,
                cache_salt=self._cache_salt,
            ) as stream:
                async for chunk in stream:
                    reply += chunk.text
                    print(chunk.text, end="", flush=True)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        except PacelineError as error:
            self.failed = True
            print(f"error: {' '.join(error.message.split())}", file=sys.stderr, flush=True)
        print(flush=True)
        if reply:
            self._messages.append({"role": "assistant", "content": reply})
        else:
            self._messages.pop()


def _lines() -> Iterator[str]:
    """The non-empty lines of standard input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - enables line editing and history in `input`
    while True:
        try:
            line = input(PROMPT if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(Ctrl-D ends the conversation)", flush=True)
            continue
        if line.strip():
            yield line
