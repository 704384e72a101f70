"""The OpenAPI document: requests from their schemas, and an outline of the answers."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coordinator.api.http.openai.schema.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REFERENCE = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}


def _object(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": list(members)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_NULLABLE_TEXT = {"type": ["string", "null"]}
_USAGE = _object(
    prompt_tokens=_NUMBER,
    completion_tokens=_NUMBER,
    total_tokens=_NUMBER,
    prompt_tokens_details=_object(cached_tokens=_NUMBER),
)
_MODEL = _object(
    id=_TEXT,
    object=_TEXT,
    created=_NUMBER,
    owned_by=_TEXT,
    root=_TEXT,
    parent={"type": "null"},
    max_model_len=_NUMBER,
)
_ANSWERS = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_NULLABLE_TEXT, code=_NULLABLE_TEXT),
    ),
    "Completion": _object(
        id=_TEXT,
        object=_TEXT,
        created=_NUMBER,
        model=_TEXT,
        system_fingerprint=_TEXT,
        choices=_list(_object(index=_NUMBER, text=_TEXT, finish_reason=_TEXT)),
        usage=_USAGE,
    ),
    "ChatCompletion": _object(
        id=_TEXT,
        object=_TEXT,
        created=_NUMBER,
        model=_TEXT,
        system_fingerprint=_TEXT,
        choices=_list(
            _object(index=_NUMBER, message=_object(role=_TEXT, content=_TEXT), finish_reason=_TEXT)
        ),
        usage=_USAGE,
    ),
    "Model": _MODEL,
    "Models": _object(object=_TEXT, data=_list(_MODEL)),
    "Tokens": _object(tokens=_list(_NUMBER), count=_NUMBER, max_model_len=_NUMBER),
    "Detokenized": _object(prompt=_TEXT),
    "Health": _object(status=_TEXT),
    "Version": _object(version=_TEXT),
}


@cache
def document() -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
    _, schemas = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": version("paceline")},
        "paths": {
            "/v1/completions": {"post": _call("Continue prompts", CompletionRequest, "Completion", True)},
            "/v1/chat/completions": {
                "post": _call("Continue a conversation", ChatRequest, "ChatCompletion", True)
            },
            "/tokenize": {"post": _call("Text to tokens", TokenizeRequest, "Tokens")},
            "/detokenize": {"post": _call("Tokens to text", DetokenizeRequest, "Detokenized")},
            "/v1/models": {"get": _question("The served model", "Models")},
            "/v1/models/{model}": {
                "get": _question("One model", "Model")
                | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]}
            },
            "/health": {"get": _question("Whether requests are served", "Health")},
            "/ping": {method: _question("As `/health`", "Health") for method in ("get", "post")},
            "/version": {"get": _question("The version of the server", "Version")},
            "/metrics": {
                "get": {
                    "summary": "Counts for Prometheus",
                    "responses": {"200": _content("The text format.", "text/plain", _TEXT)},
                }
            },
        },
        "components": {"schemas": {**schemas["$defs"], **_ANSWERS}},
    }


def _call(summary: str, model: type[BaseModel], answer: str, streams: bool = False) -> dict[str, Any]:
    question = _question(summary, answer)
    if streams:
        question["responses"]["200"]["content"]["text/event-stream"] = {}
    return question | {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _named(model.__name__)}}}
    }


def _question(summary: str, answer: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": _content("The answer.", "application/json", _named(answer)),
            "default": _content("Description of the error.", "application/json", _named("Error")),
        },
    }


def _content(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=name)}
