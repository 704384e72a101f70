"""Whether a request's structured_outputs can be honoured, found out before anything runs.

Structures are compiled in a process of its own (paceline/grammar/checks.py): what a hostile one takes is
bounded, and neither the event loop nor another tenant waits for it.
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
    """The check, for one tokenizer, on behalf of whoever calls."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size
        self.process = CompileProcess(vocabulary.tokenizer.to_str)
        self._checks = StructureChecks(self.process)

    async def check(self, wanted: StructuredOutputs, eos_token_ids: Sequence[int]) -> None:
        """Refuse what no worker could follow.

        Args:
            wanted: the request's.
            eos_token_ids: the target's.

        Raises:
            InvalidArgumentError: naming the field.
            ResourceExhaustedError: too many others wait for the same.
            UnavailableError: the coordinator is stopping.
        """
        await self._checks.check(principal.get().name, self._model(eos_token_ids), wanted)

    async def check_received(
        self, wanted: StructuredOutputs, eos_token_ids: Sequence[int], received: Sequence[Sequence[int]]
    ) -> None:
        """Refuse tokens of a client's that no worker would have chosen. Raises as `check`, which is first."""
        model = self._model(eos_token_ids)
        if not await self._checks.follows(principal.get().name, model, wanted, received):
            raise InvalidArgumentError("received", "does not keep to the request's structured_outputs")

    def close(self) -> None:
        """End the process at once; whoever waits is refused with UnavailableError. May be repeated."""
        self._checks.close()

    def _model(self, eos_token_ids: Sequence[int]) -> StructureVocabulary:
        return StructureVocabulary(self._size, tuple(eos_token_ids))
