"""`stacked:a+b`: the scores of a where it has a context, else those of b."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from draft_worker.drafters.interface import DrafterKind
from draft_worker.drafters.tokens import Row, TextDrafterKind, TextScorer, of_scorers
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading.build import Built

NAME = "stacked"


class StackedScorer:
    """The first of its parts that has a context speaks; the last one always may."""

    def __init__(self, parts: Sequence[TextScorer]) -> None:
        self._parts = parts

    def count(self, text: Sequence[int], length: int) -> None:
        """See `TextScorer`."""
        for part in self._parts:
            part.count(text, length)

    def has_context(self, text: Sequence[int]) -> bool:
        """True if any part has one."""
        return any(part.has_context(text) for part in self._parts)

    def score(self, text: Sequence[int], row: Row) -> None:
        """See `TextScorer`."""
        *others, last = self._parts
        next((part for part in others if part.has_context(text)), last).score(text, row)


def stacked(parts: Sequence[str], kinds: Mapping[str, DrafterKind]) -> TextDrafterKind:
    """The drafter of two or more parts, named in order of precedence. Raises InvalidArgumentError naming
    `drafter`."""
    found = [(name, kind) for name in parts if isinstance(kind := kinds.get(name), TextDrafterKind)]
    if len(found) < len(parts) or len(parts) < 2:
        known = ", ".join(name for name, kind in kinds.items() if isinstance(kind, TextDrafterKind))
        raise InvalidArgumentError("drafter", f"{NAME}:a+b takes two or more of {known}")
    for name, kind in found[:-1]:
        if not kind.may_lack_context:
            raise InvalidArgumentError("drafter", f"{name} has a context after every text: it must be last")

    def scorers(built: Built, config: DraftConfig) -> Callable[[], TextScorer]:
        makers = [kind.scorers(built, config) for _, kind in found]
        return lambda: StackedScorer([make() for make in makers])

    return of_scorers(scorers, reads_corpus=any(kind.reads_corpus for _, kind in found))
