"""`response_format` and `structured_outputs` reach the core, or are refused by their names."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from coordinator.api.http.openai.schema.bodies import ChatRequest
from coordinator.api.http.server.body import parse
from coordinator.api.http.server.errors import HttpError, from_error
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from tests.unit.http.api import CHATS, LEAST, both_models

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT, OBJECT = {"type": "text"}, {"type": "json_object"}


def wanted(model: Any, least: dict[str, Any], **given: Any) -> Any:
    return parse(orjson.dumps(least | given), model)


def json_schema(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA} | changes}


@both_models
@pytest.mark.parametrize(
    ("given", "core"),
    [
        ({"response_format": TEXT}, None),
        ({"response_format": OBJECT}, {"json_object": True}),
        ({"response_format": json_schema(strict=True, description="d")}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json": '{"type": "null"}'}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": TEXT}, {"regex": "a"}),
    ],
)
def test_structures_reach_the_core(model: Any, least: dict[str, Any], given: Any, core: Any) -> None:
    want = None if core is None else StructuredOutputs(**core)
    assert wanted(model, least, **given).sampling().structure == want


@both_models
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": json_schema(schema="{}")}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(strikt=True)}, "response_format.json_schema.strikt"),
        ({"response_format": json_schema(schema={"x": "y" * 70_000})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "["}, "response_format": TEXT}, "structured_outputs.json"),
        ({"structured_outputs": {}, "response_format": TEXT}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": OBJECT}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": OBJECT, "bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_unsupported_structures_are_refused_by_name(
    model: Any, least: dict[str, Any], given: Any, param: str
) -> None:
    with pytest.raises((HttpError, InvalidArgumentError)) as caught:
        wanted(model, least, **given).sampling()
    error = caught.value
    names = wanted(model, least, **given).names if isinstance(error, InvalidArgumentError) else {}
    answer = from_error(error, names)
    assert (answer.status, answer.param) == (400, param)


def test_a_late_refusal_has_the_requests_field_name() -> None:
    names = wanted(ChatRequest, LEAST[CHATS], response_format=json_schema()).names
    error = from_error(InvalidArgumentError("structured_outputs.json", "Invalid type"), names)
    assert error.param == "response_format.json_schema.schema"
