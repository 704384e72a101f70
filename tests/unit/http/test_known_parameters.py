"""Every parameter of OpenAI and vLLM is honoured, or refused by name with a reason."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chats
from pydantic import ValidationError

from coordinator.api.http.openai.schema.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from coordinator.api.http.server.body import parse
from coordinator.api.http.server.errors import HttpError
from tests.unit.http.api import MESSAGES

_VLLM_BOTH = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens
min_p min_tokens model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty
request_id response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream stream_interval stream_options structured_outputs temperature thinking_token_budget
top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
"""
_VLLM_COMPLETION = "prompt prompt_embeds echo suffix best_of"
_VLLM_CHAT = """
messages tools tool_choice reasoning_effort include_reasoning parallel_tool_calls echo add_generation_prompt
continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
return_prompt_text top_logprobs max_completion_tokens best_of
"""
_VLLM_TOKENIZE = """
model prompt messages add_special_tokens add_generation_prompt continue_final_message return_token_strs
chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools
"""
ODD = {"nobody": "sends this"}
"""A value that no parameter takes for a default."""


def names_of(params: Any) -> set[str]:
    """What the installed client of OpenAI's can send."""
    return {name for cls in params.__mro__ for name in getattr(cls, "__annotations__", {})}


OPENAI_COMPLETION = names_of(openai_completions.CompletionCreateParamsBase) | {"stream"}
OPENAI_CHAT = names_of(openai_chats.CompletionCreateParamsBase) | {"stream"}
ENDPOINTS: list[tuple[Any, dict[str, Any], set[str]]] = [
    (CompletionRequest, {"prompt": "x"}, OPENAI_COMPLETION | {*(_VLLM_BOTH + _VLLM_COMPLETION).split()}),
    (ChatRequest, {"messages": MESSAGES}, OPENAI_CHAT | {*(_VLLM_BOTH + _VLLM_CHAT).split()}),
    (TokenizeRequest, {"prompt": "x"}, {*_VLLM_TOKENIZE.split()}),
    (DetokenizeRequest, {"tokens": [1]}, {"model", "tokens"}),
]
CASES = [(model, least, name) for model, least, names in ENDPOINTS for name in sorted(names)]


@pytest.mark.parametrize(("model", "least", "name"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_a_known_parameter_is_honoured_or_refused(model: Any, least: dict[str, Any], name: str) -> None:
    if name in model.model_fields:
        return
    with pytest.raises(HttpError) as caught:
        parse(orjson.dumps(least | {name: ODD}), model)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert len(error.message.removeprefix(f"{name}: ").split()) >= 4, error.message
    assert parse(orjson.dumps(least | {name: None}), model) == parse(orjson.dumps(least), model)


@pytest.mark.parametrize(("model", "least", "names"), ENDPOINTS)
def test_only_parameters_known_to_clients_are_listed(
    model: Any, least: dict[str, Any], names: set[str]
) -> None:
    assert {*getattr(model, "UNSUPPORTED", {})} <= names


def test_openais_parameters_are_read_from_its_client() -> None:
    assert {"prompt", "logit_bias", "suffix"} <= OPENAI_COMPLETION
    assert {"messages", "tools", "verbosity", "web_search_options"} <= OPENAI_CHAT


@pytest.mark.parametrize(
    "values",
    [
        *({name: [None] * 100} for name in ("prompt", "stop", "bad_words", "guided_choice")),
        *({name: [None] * 100} for name in ("stop_token_ids", "allowed_token_ids")),
        {"structured_outputs": {"choice": [None] * 100}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_list_is_refused_by_its_first_bad_item(values: dict[str, Any]) -> None:
    """A report on each item of a long list would keep all other streams waiting."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "x", **values})
    assert caught.value.error_count() == 1
