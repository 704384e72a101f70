"""Options for the format of the text, common to all generating commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.system.small_files import read_text
from paceline.core.types import SamplingParams, StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """At most one format; schema and grammar are files."""

    json_schema: Path | None = None
    """File with a JSON schema that the text must follow."""
    json_object: bool = False
    """The text must be a JSON object."""
    regex: str | None = None
    """Regular expression that the whole text must match."""
    grammar: Path | None = None
    """File with a Lark grammar that the text must follow."""
    choice: tuple[str, ...] = ()
    """A possible text; may be repeated."""

    def of(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters with this format. Raises InvalidArgumentError naming the option."""
        values: dict[str, Any] = {
            "json": _content("json_schema", self.json_schema),
            "json_object": self.json_object or None,
            "regex": self.regex,
            "grammar": _content("grammar", self.grammar),
            "choice": self.choice or None,
        }
        if all(value is None for value in values.values()):
            return sampling
        return replace(sampling, structured_outputs=StructuredOutputs(**values))


def _content(name: str, file: Path | None) -> str | None:
    return None if file is None else read_text(name, file)
