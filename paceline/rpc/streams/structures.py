"""Checks structures before they reach a worker's engine thread.

A sequence with a structure that was not checked recently is held back, together with its following commands,
while the structure is compiled in a separate process with limits (paceline/grammar/checks.py). Then it is
compiled again on a side thread, which takes no longer, and passed to the engine with the sequence. All other
commands pass through, so that rounds of other sequences continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.core import limits
from paceline.core.errors import InternalError, PacelineError, ResourceExhaustedError
from paceline.core.messages import CloseSequence, OpenSequence, SequenceFailed
from paceline.grammar import Grammars
from paceline.grammar.checks import StructureChecks
from paceline.grammar.process import StructureVocabulary
from paceline.rpc.streams.worker_stream import StreamEngine, ask

log = logging.getLogger(__name__)

_MAX_COMMANDS = 64
"""Commands held back for one sequence. A coordinator sends only a few before an answer."""
Route = Callable[[Sequence[Any]], None]


@dataclass(slots=True)
class _Held:
    """A held-back sequence."""

    opening: OpenSequence
    task: asyncio.Task[None] | None = None
    commands: list[Any] = field(default_factory=list)
    """Commands after the opening."""


class StructureGuard:
    """Wraps the engine for streams, on the event loop."""

    def __init__(self, engine: StreamEngine, checks: StructureChecks, grammars: Grammars | None) -> None:
        """`grammars` are the engine's; an engine without grammars refuses structures itself."""
        self._engine = engine
        self._checks = checks
        self._grammars = grammars
        self._held: dict[tuple[Route, str], _Held] = {}
        self._compiling = asyncio.Lock()

    @property
    def seconds_since_progress(self) -> float:
        """As the engine's."""
        return self._engine.seconds_since_progress

    def submit(self, route: Route, commands: Sequence[Any]) -> None:
        """Queue commands of one stream or hold them back."""
        ready: list[Any] = []
        for command in commands:
            held = self._held.get((route, command.sequence_id)) if self._held else None
            if held is not None:
                ready += self._add(route, held, command)
            elif isinstance(command, OpenSequence) and self._is_unknown(command):
                ready += self._hold(route, command)
            else:
                ready.append(command)
        if ready:
            self._engine.submit(route, ready)

    def leave(self, route: Route) -> None:
        """Report the end of a stream."""
        for key in [key for key in self._held if key[0] is route]:
            self._drop(key)
        self._engine.leave(route)

    def ask(self, question: Callable[[], None]) -> None:
        """Run `question` on the engine thread between steps."""
        self._engine.ask(question)

    def close(self) -> None:
        """Drop all held sequences and close the checks."""
        for key in list(self._held):
            self._drop(key)
        self._checks.close()

    def _is_unknown(self, opening: OpenSequence) -> bool:
        wanted, grammars = opening.params.sampling.structure, self._grammars
        if wanted is None or grammars is None:
            return False
        salt = opening.params.cache_salt
        return not (grammars.holds(wanted, salt) and self._checks.passed(salt, _model(grammars), wanted))

    def _hold(self, route: Route, opening: OpenSequence) -> list[Any]:
        if len(self._held) >= limits.MAX_RUNNING_SEQUENCES:
            return [_failed(opening, ResourceExhaustedError("too many structures are being compiled", 1.0))]
        held = self._held[route, opening.sequence_id] = _Held(opening)
        held.task = asyncio.create_task(self._examine(route, held))
        return []

    def _add(self, route: Route, held: _Held, command: Any) -> list[Any]:
        """Hold a command back after its sequence's opening; returns commands that may pass at once."""
        if isinstance(command, SequenceFailed):
            return [command]
        if isinstance(command, CloseSequence) and command.epoch >= held.opening.epoch:
            self._drop((route, command.sequence_id))
            return [command]
        if len(held.commands) >= _MAX_COMMANDS:
            return [_failed(command, ResourceExhaustedError("too many commands while compiling a structure"))]
        held.commands.append(command)
        return []

    def _drop(self, key: tuple[Route, str]) -> None:
        task = self._held.pop(key).task
        if task is not None:
            task.cancel()

    async def _examine(self, route: Route, held: _Held) -> None:
        first: Any = held.opening
        try:
            await self._prepare(held.opening)
        except PacelineError as error:
            first = _failed(held.opening, error)
        except Exception:
            log.exception("a structure could not be checked")
            first = _failed(held.opening, InternalError("structured_outputs could not be checked"))
        del self._held[route, held.opening.sequence_id]
        self._engine.submit(route, [first])
        if held.commands:
            self.submit(route, held.commands)

    async def _prepare(self, opening: OpenSequence) -> None:
        """Check and compile the structure and cache it in the engine. Raises PacelineError."""
        wanted, salt, grammars = opening.params.sampling.structure, opening.params.cache_salt, self._grammars
        assert wanted is not None
        assert grammars is not None
        await self._checks.check(salt, _model(grammars), wanted)
        async with self._compiling:
            if not grammars.holds(wanted, salt):
                prototype = await asyncio.to_thread(grammars.compiled, wanted)
                await ask(self._engine, partial(grammars.keep, wanted, salt, prototype))


def _model(grammars: Grammars) -> StructureVocabulary:
    return StructureVocabulary(grammars.vocabulary_size, grammars.ends)


def _failed(command: Any, error: PacelineError) -> SequenceFailed:
    return SequenceFailed(command.sequence_id, command.epoch, getattr(command, "round", 0), error)
