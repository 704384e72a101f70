"""The server's interface to the compile process (child.py), which is started on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UnavailableError
from paceline.core.structured import StructuredOutputs
from paceline.grammar.child import HEADER, TOKEN, frame

log = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-P", "-m", "paceline.grammar.child")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""A forking process must be single-threaded: a lock held by another thread would stay locked in the fork."""
_TRIES = 2
"""Retried once, because the process may have been killed since the last structure."""


@dataclass(frozen=True, slots=True)
class StructureVocabulary:
    """The facts of a model that a structure is compiled for."""

    vocabulary_size: int
    eos_token_ids: tuple[int, ...]


class CompileProcess:
    """Handles one request at a time, on one event loop."""

    def __init__(self, tokenizer: Callable[[], str | None]) -> None:
        """`tokenizer` returns the content of tokenizer.json, or None; it is called on another thread."""
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._loaded: StructureVocabulary | None = None
        self._requests = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id; None if not running."""
        return None if self._process is None else self._process.pid

    async def check(self, model: StructureVocabulary, wanted: StructuredOutputs) -> dict[str, Any]:
        """Check a structure; the answer is that of child.py. Raises UnavailableError without a process."""
        return await self._ask(model, {"do": "check", "structure": _members(wanted)})

    async def follow(
        self, model: StructureVocabulary, wanted: StructuredOutputs, texts: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Check that texts of token ids follow a structure. Answers and raises as `check`."""
        tokens = array(TOKEN)
        for text in texts:
            tokens.extend(text)
        header = {"do": "follow", "structure": _members(wanted), "lengths": [len(text) for text in texts]}
        return await self._ask(model, header, tokens.tobytes())

    def close(self) -> None:
        """Kill the process for good. Idempotent."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process, self._loaded = self._process, None, None
        if process is None:
            return
        self._writer.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # includes its fork
        process.wait()

    async def _ask(
        self, model: StructureVocabulary, header: dict[str, Any], tail: bytes = b""
    ) -> dict[str, Any]:
        for _ in range(_TRIES):
            if self._closed:
                break
            try:
                return await self._try(model, header, tail)
            except (OSError, asyncio.IncompleteReadError) as error:
                log.warning("the compile process for structures has ended: %s", type(error).__name__)
                self._end()
        raise UnavailableError("structured_outputs cannot be compiled at the moment")

    async def _try(self, model: StructureVocabulary, header: dict[str, Any], tail: bytes) -> dict[str, Any]:
        if self._process is None:
            await self._start()
        if self._loaded != model:
            await self._load(model)
        self._requests += 1
        request = self._requests
        try:
            self._writer.write(frame(header | {"id": request}, tail))
            await self._writer.drain()
            while True:
                answer = await self._read()
                if answer["id"] == request:  # skip answers to cancelled requests
                    return answer
        except asyncio.CancelledError:
            if self._process is not None:
                self._writer.write(frame({"do": "give up", "id": request}))
            raise

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                self._process = subprocess.Popen(  # noqa: ASYNC220 - only fork and exec
                    _PROGRAM,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    process_group=0,
                )
            except BaseException:
                writer.close()
                raise
        self._reader, self._writer = reader, writer

    async def _load(self, model: StructureVocabulary) -> None:
        tokenizer = await asyncio.to_thread(self._tokenizer)
        header = {
            "do": "load",
            "vocabulary_size": model.vocabulary_size,
            "eos_token_ids": list(model.eos_token_ids),
            "has_tokenizer": tokenizer is not None,
        }
        self._writer.write(frame(header, (tokenizer or "").encode()))
        self._loaded = model

    async def _read(self) -> dict[str, Any]:
        length, tail = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        message = await self._reader.readexactly(length + tail)
        answer: dict[str, Any] = json.loads(message[:length])
        return answer


def _environment() -> dict[str, str]:
    """This process's environment without Paceline's settings, some of which are secrets."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")} | _ONE_THREAD


def _members(wanted: StructuredOutputs) -> Mapping[str, Any]:
    value = getattr(wanted, wanted.kind)
    return {wanted.kind: value, "disable_any_whitespace": wanted.disable_any_whitespace}
