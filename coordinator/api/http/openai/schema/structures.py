"""Structured outputs over HTTP: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from coordinator.api.http.openai.schema.fields import Schema, Strings
from paceline.core import limits
from paceline.core.structured import FIELD, StructuredOutputs

_TYPES: Final = ("text", "json_object", "json_schema", "json", "regex")
MAX_NAME_CHARACTERS: Final = 64


class TextFormat(Schema):
    """Any text."""

    type: Literal["text"]


def _schema_shape(value: Any) -> str:
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else "<other>"


JsonSchemaValue = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(
        _schema_shape,
        custom_error_type="alternatives",
        custom_error_message="must be a JSON schema: an object or its text",
    ),
]


class JsonObjectFormat(Schema):
    """Any JSON object. With a value, as in TGI, JSON that follows that schema."""

    type: Literal["json_object"]
    value: JsonSchemaValue | None = None


class JsonFormat(Schema):
    """TGI's format: JSON that follows a schema."""

    type: Literal["json"]
    value: JsonSchemaValue


class RegexFormat(Schema):
    """TGI's format: text that matches a regular expression."""

    type: Literal["regex"]
    value: str


class JsonSchema(Schema):
    """A JSON schema with a name."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: Annotated[str, Field(max_length=limits.MAX_STRUCTURE_CHARACTERS)] | None = None
    strict: bool | None = Field(None, description="Without effect: the schema is always followed.")


class JsonSchemaFormat(Schema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _type_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else "<none>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[JsonFormat, Tag("<json>")]
    | Annotated[RegexFormat, Tag("<regex>")],
    Discriminator(
        _type_of,
        custom_error_type="alternatives",
        custom_error_message=f"must be an object whose type is {', '.join(_TYPES)}",
    ),
]


class StructuredOutputsBody(Schema):
    """vLLM's structured_outputs: exactly one of json, regex, choice, grammar and json_object."""

    json_text: JsonSchemaValue | None = Field(None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    def value(self) -> StructuredOutputs:
        """The core's structure. Raises InvalidArgumentError naming the field."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputs.from_mapping(given)


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | JsonFormat | RegexFormat


def structure_of(format_: AnyFormat) -> StructuredOutputs | None:
    """A `response_format`'s structure; None for text. Raises InvalidArgumentError naming the core field."""
    match format_:
        case TextFormat():
            return None
        case JsonObjectFormat(value=None):
            return StructuredOutputs(json_object=True)
        case JsonObjectFormat() | JsonFormat():
            return StructuredOutputs(json=format_.value)
        case JsonSchemaFormat():
            return StructuredOutputs(json=format_.json_schema.json_schema)
        case RegexFormat():
            return StructuredOutputs(regex=format_.value)


def format_names(format_: AnyFormat) -> dict[str, str]:
    """Maps the core's fields to their names in a request with this `response_format`."""
    schema = "json_schema.schema" if isinstance(format_, JsonSchemaFormat) else "value"
    return {
        f"{FIELD}.json": f"response_format.{schema}",
        f"{FIELD}.regex": "response_format.value",
        f"{FIELD}.json_object": "response_format",
        FIELD: "response_format",
    }
