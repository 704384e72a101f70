"""Checks that a request's structured_outputs can be followed, before anything runs.

Structures are compiled in a separate process (paceline/grammar/checks.py). This bounds the resources of a
hostile structure and keeps the event loop and other tenants from waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.auth import principal
from coordinator.text.vocabulary import Vocabulary
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from paceline.grammar.checks import StructureChecks
from paceline.grammar.process import CompileProcess, StructureVocabulary


class Structures:
    """The check for one tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size
        self.process = CompileProcess(vocabulary.tokenizer.to_str)
        self._checks = StructureChecks(self.process)

    async def check(self, wanted: StructuredOutputs, eos_token_ids: Sequence[int]) -> None:
        """Refuse structures that no worker could follow.

        Args:
            wanted: the request's.
            eos_token_ids: the target's.

        Raises:
            InvalidArgumentError: naming the field.
            ResourceExhaustedError: too many other checks wait.
            UnavailableError: the coordinator is stopping.
        """
        await self._checks.check(principal.get().name, self._model(eos_token_ids), wanted)

    async def check_received(
        self, wanted: StructuredOutputs, eos_token_ids: Sequence[int], received: Sequence[Sequence[int]]
    ) -> None:
        """Refuse a client's tokens that no worker would have chosen. Call `check` first; same errors."""
        model = self._model(eos_token_ids)
        if not await self._checks.follows(principal.get().name, model, wanted, received):
            raise InvalidArgumentError("received", "does not follow the request's structured_outputs")

    def close(self) -> None:
        """End the process at once; waiting checks fail with UnavailableError. May be repeated."""
        self._checks.close()

    def _model(self, eos_token_ids: Sequence[int]) -> StructureVocabulary:
        return StructureVocabulary(self._size, tuple(eos_token_ids))
