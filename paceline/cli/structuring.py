"""What the text must look like: options that every command which generates has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.system.small_files import read_text
from paceline.core.types import SamplingParams, StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """At most one of these; schema and grammar are in files."""

    json_schema: Path | None = None
    """A file with the JSON schema the text keeps to."""
    json_object: bool = False
    """The text is a JSON object, whatever is in it."""
    regex: str | None = None
    """A regular expression the whole text matches."""
    grammar: Path | None = None
    """A file with the Lark grammar the text keeps to."""
    choice: tuple[str, ...] = ()
    """A text to choose from; may be repeated."""

    def of(self, sampling: SamplingParams) -> SamplingParams:
        """The same with this structure. Raises InvalidArgumentError naming the option."""
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
