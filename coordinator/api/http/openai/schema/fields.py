"""Building blocks of request schemas: fields, their types, and the handling of unknown members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator
from pydantic_core import CoreSchema

from coordinator.api.http.openai.schema.unsupported import Unsupported
from coordinator.api.http.server.errors import unknown_parameter, unsupported_parameter

MAX_LABEL_CHARACTERS = 512

TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": 2**32 - 1})]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation of a list stops at the first bad item: errors for a million items would take seconds."""
Strings = Annotated[list[str], Field(fail_fast=True)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]


def told(description: str | None = None, **bounds: Any) -> Any:
    """An optional field. `bounds` are for the document only: the core checks them, once for both APIs."""
    return Field(None, description=description, json_schema_extra=bounds or None)


def shape_of(value: Any) -> str:
    """The tag of the alternative that a value is meant to be, from its JSON type."""
    match value:
        case str():
            return "<text>"
        case bool() | [bool(), *_]:
            return "<other>"
        case int():
            return "<number>"
        case [int(), *_]:
            return "<ids>"
        case [list(), *_]:
            return "<lists>"
        case [dict(), *_]:
            return "<parts>"
    return "<texts>" if isinstance(value, list) else "<other>"


def one_of(message: str) -> Discriminator:
    """A choice between alternatives tagged by `shape_of`."""
    return Discriminator(shape_of, custom_error_type="alternatives", custom_error_message=message)


Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Strings, Tag("<texts>")],
    one_of("must be a string or a list of strings"),
]


class Schema(BaseModel):
    """A JSON object without implicit conversions and without unknown members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TolerantSchema(Schema):
    """A request that may also set parameters of other servers to values without effect."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = {}
    """Parameters of other servers that have no field here."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_can_be_honoured(cls, values: Any) -> Any:
        for name in values:
            if name in cls.model_fields:
                continue
            if name not in cls.UNSUPPORTED:
                raise unknown_parameter(name)
            if not cls._is_harmless(name, values):
                raise unsupported_parameter(name, cls.UNSUPPORTED[name].why)
        return {name: value for name, value in values.items() if name in cls.model_fields}

    @classmethod
    def _is_harmless(cls, name: str, values: Mapping[str, Any]) -> bool:
        """True if an unsupported parameter has a value without effect."""
        value = values[name]
        return value is None or any(_same(value, other) for other in cls.UNSUPPORTED[name].harmless)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, parameter in cls.UNSUPPORTED.items():
            # In JSON the numbers 1 and 1.0 are equal; values of an enum differ.
            values = parameter.harmless
            unlike = [value for index, value in enumerate(values) if value not in values[:index]]
            description = f"Without effect. Other values are refused: {parameter.why}."
            properties[name] = {"enum": [*unlike, None], "default": None, "description": description}
        return schema


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
