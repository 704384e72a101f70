"""The context sources by name. Their order settles ties between guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from coordinator.proposers import grammar, ngram, prompt_lookup, suffix
from coordinator.proposers.finished_texts import FinishedTexts
from coordinator.proposers.grammar import GrammarSource
from coordinator.proposers.interface import ContextSource
from coordinator.proposers.ngram import NgramSource
from coordinator.proposers.prompt_lookup import PromptLookup
from coordinator.proposers.suffix import SuffixSettings, SuffixSource
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.predictors.copying import TextIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetting:
    """What a sequence's sources are made from: settings, and what earlier requests left."""

    prompt_lookup_min: int = limits.PROMPT_LOOKUP_MIN
    prompt_lookup_max: int = limits.PROMPT_LOOKUP_MAX
    suffix: SuffixSettings = field(default_factory=SuffixSettings)
    finished: FinishedTexts = field(default_factory=lambda: FinishedTexts(0))
    salt: str = ""
    """Only requests with the same salt may learn from each other."""
    prompt_length: int = 0
    structured: bool = False
    """The request asks for a structured output."""


def _prompt_lookup(setting: SourceSetting) -> ContextSource:
    return PromptLookup(TextIndex(setting.prompt_lookup_min, setting.prompt_lookup_max))


def _suffix(setting: SourceSetting) -> ContextSource:
    return SuffixSource(setting.suffix, setting.finished, setting.salt, setting.prompt_length)


CONTEXT_SOURCES: Final[dict[str, Callable[[SourceSetting], ContextSource]]] = {
    grammar.NAME: lambda setting: GrammarSource(setting.structured),
    prompt_lookup.NAME: _prompt_lookup,
    suffix.NAME: _suffix,
    ngram.NAME: lambda _: NgramSource(),
}


def check_sources(field_name: str, names: Iterable[str]) -> None:
    """Raises InvalidArgumentError naming the field for a source that is not registered."""
    for name in names:
        if name not in CONTEXT_SOURCES:
            known = ", ".join(sorted(CONTEXT_SOURCES))
            raise InvalidArgumentError(field_name, f"there is no source {name!r}; there are {known}")


def make_sources(names: Iterable[str], setting: SourceSetting) -> list[ContextSource]:
    """The named sources of one sequence, in the order of the registry."""
    wanted = set(names)
    return [make(setting) for name, make in CONTEXT_SOURCES.items() if name in wanted]
