"""The context sources by name. Their order settles ties between guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.proposers import prompt_lookup
from coordinator.proposers.interface import ContextSource
from coordinator.proposers.prompt_lookup import PromptLookup

CONTEXT_SOURCES: Final[dict[str, Callable[[], ContextSource]]] = {prompt_lookup.NAME: PromptLookup}
