"""Whether a request's structured_outputs can be honoured, found out before anything runs.

Structures are compiled one after the other in a thread of their own, so that neither the event loop nor more
than one core waits for a hostile one. What was found is remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars

T = TypeVar("T")


@dataclass(slots=True)
class Structures:
    """The check, for one tokenizer."""

    vocabulary: Vocabulary
    _found: OrderedDict[StructuredOutputs, InvalidArgumentError | None] = field(default_factory=OrderedDict)
    _grammars: Grammars | None = None
    _eos_token_ids: tuple[int, ...] = ()
    _waiting: int = 0
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="structures")
    )

    async def check(self, wanted: StructuredOutputs, eos_token_ids: Sequence[int]) -> None:
        """Refuse what no worker could follow.

        Args:
            wanted: the request's.
            eos_token_ids: the target's.

        Raises:
            InvalidArgumentError: naming the field.
            ResourceExhaustedError: too many others wait for the same.
        """
        if wanted not in self._found:
            await self._find_out(wanted, tuple(eos_token_ids))
        error = self._found.get(wanted)
        if error is not None:
            # A fresh one: an exception that is raised twice would collect tracebacks.
            raise InvalidArgumentError(error.field, error.description)

    async def check_received(
        self, wanted: StructuredOutputs, eos_token_ids: Sequence[int], received: Sequence[Sequence[int]]
    ) -> None:
        """Refuse tokens of a client's that no worker would have chosen. Raises as `check`, which is first."""
        # However many others wait to be compiled: nobody who comes back is sent away for them.
        kept = await self._in_thread(self._follow, wanted, tuple(eos_token_ids), received)
        if not kept:
            raise InvalidArgumentError("received", "does not keep to the request's structured_outputs")

    async def _find_out(self, wanted: StructuredOutputs, eos_token_ids: tuple[int, ...]) -> None:
        if self._waiting >= limits.MAX_STRUCTURE_CHECKS:
            raise ResourceExhaustedError("too many requests wait for their structured_outputs to be compiled")
        self._waiting += 1
        try:
            self._found[wanted] = await self._in_thread(self._error, wanted, eos_token_ids)
        finally:
            self._waiting -= 1
        if len(self._found) > limits.MAX_COMPILED_STRUCTURES:
            self._found.popitem(last=False)

    async def _in_thread(self, find: Callable[..., T], *of: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, find, *of)

    def _error(
        self, wanted: StructuredOutputs, eos_token_ids: tuple[int, ...]
    ) -> InvalidArgumentError | None:
        """What is wrong with it; runs in the thread."""
        try:
            self._grammars_for(eos_token_ids).check(wanted)
        except InvalidArgumentError as error:
            return error.with_traceback(None)
        return None

    def _follow(
        self, wanted: StructuredOutputs, eos_token_ids: tuple[int, ...], texts: Sequence[Sequence[int]]
    ) -> bool:
        """Whether all of them keep to it; runs in the thread."""
        state = self._grammars_for(eos_token_ids).alone(wanted)
        until = state.clock() + limits.MAX_FOLLOW_SECONDS
        return all(state.follows(text, until) for text in texts)

    def _grammars_for(self, eos_token_ids: tuple[int, ...]) -> Grammars:
        if self._grammars is None or self._eos_token_ids != eos_token_ids:
            tokenizer = self.vocabulary.tokenizer.to_str()
            self._grammars = Grammars(tokenizer, self.vocabulary.size, eos_token_ids)
            self._eos_token_ids = eos_token_ids
        return self._grammars
