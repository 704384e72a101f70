"""Formats of generated text: a JSON schema, a regular expression, a grammar or a choice.

The names are those of vLLM's `StructuredOutputsParams`.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.validation import items, require

FIELD: Final = "structured_outputs"
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`; the whole text has that format.

    A schema is a dictionary or its JSON text, and is stored as text. Members are generated in the schema's
    order. The server checks that the library supports a schema, expression or grammar.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression without look-around and back-references."""
    choice: Sequence[str] | None = None
    """Texts to choose from."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax, with `start` as its first rule."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""

    def __post_init__(self) -> None:
        """Normalise shorthand values. Raises InvalidArgumentError naming the field."""
        require(self.json_object is None or isinstance(self.json_object, bool), *_boolean("json_object"))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        names = ", ".join(KINDS)
        require(len(given) == 1, FIELD, f"must have exactly one of {names}; got {', '.join(given) or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", items(f"{FIELD}.choice", self.choice))
        self._check_texts()
        require(
            isinstance(self.disable_any_whitespace, bool),
            *_boolean("disable_any_whitespace"),
        )
        require(
            not self.disable_any_whitespace or self.kind in ("json", "json_object"),
            f"{FIELD}.disable_any_whitespace",
            "requires json or json_object",
        )

    def _check_texts(self) -> None:
        name, texts = f"{FIELD}.{self.kind}", self._texts
        if self.choice is not None:
            most = limits.MAX_STRUCTURE_CHOICES
            require(1 <= len(texts) <= most, name, f"must be between 1 and {most} texts, got {len(texts)}")
        for text in texts:
            require(isinstance(text, str) and bool(text), name, "must be text, and not empty")
        size, most = sum(map(len, texts)), limits.MAX_STRUCTURE_CHARACTERS
        require(size <= most, name, f"at most {most} characters, got {size}")

    @property
    def kind(self) -> str:
        """The entry of `KINDS` that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def field(self) -> str:
        """The field name for errors."""
        return f"{FIELD}.{self.kind}"

    @property
    def _texts(self) -> Sequence[str]:
        value = getattr(self, self.kind)
        return value if self.kind == "choice" else () if value is True else (value,)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary. Raises InvalidArgumentError for an unknown name."""
        known = [f.name for f in fields(cls)]
        for name in values:
            require(name in known, f"{FIELD}.{name}", f"unknown parameter; known are {', '.join(known)}")
        return cls(**values)


def structured_outputs(value: Any) -> StructuredOutputs | None:
    """Convert a request's `structured_outputs`, which may be a dictionary. Raises InvalidArgumentError."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if isinstance(value, Mapping):
        return StructuredOutputs.from_mapping(value)
    raise InvalidArgumentError(FIELD, "must be StructuredOutputs or a dictionary")


def _boolean(name: str) -> tuple[str, str]:
    return f"{FIELD}.{name}", "must be true or false"


def _schema_text(schema: Any) -> str:
    """The JSON text of a schema, which must be an object."""
    name = f"{FIELD}.json"
    try:
        if not isinstance(schema, str):
            require(isinstance(schema, Mapping), name, "must be a JSON schema: a dictionary or JSON text")
            # Not escaped, because characters are counted.
            return json_text.dumps(dict(schema), allow_nan=False, ensure_ascii=False)
        # A longer schema is refused later; parsing it would take memory in proportion.
        if len(schema) <= limits.MAX_STRUCTURE_CHARACTERS:
            require(isinstance(json_text.loads(schema), dict), name, "must be a JSON object")
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(name, "is not JSON") from None
    return schema
