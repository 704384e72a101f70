"""Every error has a status and OpenAI's shape, and reveals nothing."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from coordinator.api.http.server.errors import HttpError, from_error
from coordinator.auth import NeverFitsError
from paceline.core import errors, limits
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.codec import GenerateCall, check_against_model
from paceline.rpc.codec.generation import ContextLengthError
from paceline.rpc.codec.status import from_status, to_status
from tests.unit.http.api import CHATS, COMPLETIONS, LEAST, MAX_MODEL_LEN, Api

STATUSES = [
    (errors.InvalidArgumentError("seed", "is wrong"), 400, "seed"),
    (errors.TokenizerMismatchError("draft_model", "differs"), 400, "draft_model"),
    (errors.UnauthenticatedError("a key is required"), 401, None),
    (errors.PermissionDeniedError("not for you"), 403, None),
    (errors.AlreadyExistsError("request_id", "is running already"), 409, "request_id"),
    (errors.NotFoundError("no such thing"), 404, None),
    (errors.FailedPreconditionError("behind"), 409, None),
    (errors.StaleEpochError("stale"), 409, None),
    (errors.ResourceExhaustedError("full"), 429, None),
    (errors.CancelledError("gone"), 499, None),
    (errors.InternalError("broken"), 500, None),
    (errors.UnavailableError("away"), 503, None),
    (errors.DeadlineExceededError("late"), 504, None),
]


def test_the_status_table_has_every_error() -> None:
    kinds = {value for value in vars(errors).values() if isinstance(value, type)}
    assert {type(error) for error, _, _ in STATUSES} == kinds - {errors.PacelineError}


@pytest.mark.parametrize(("error", "status", "param"), STATUSES)
async def test_each_error_has_its_status_and_shape(
    error: errors.PacelineError, status: int, param: str | None, coordinator: Any, api: Api
) -> None:
    coordinator.refusal = error
    answer = await api.ask()
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    content = answer.json()["error"]
    assert set(content) == {"message", "type", "param", "code"}
    assert (content["param"], content["message"]) == (param, error.message)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_an_unexpected_error_is_500_without_its_text(coordinator: Any, api: Api) -> None:
    coordinator.refusal = RuntimeError("a prompt's text")
    error = {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
    assert await api.refusal(status=500) == error


def test_only_temporary_refusals_have_retry_after() -> None:
    assert from_error(NeverFitsError("more than ever")).headers == {"x-should-retry": "false"}
    assert from_error(errors.ResourceExhaustedError("full")).headers == {"retry-after": "1"}
    assert from_error(errors.ResourceExhaustedError("full", 29.5)).headers == {"retry-after": "30"}


def test_openais_client_does_not_retry_impossible_requests() -> None:
    """It retries 429 unless told not to."""

    def tries(error: errors.ResourceExhaustedError) -> int:
        asked, told = [], from_error(error)

        def answer(request: httpx2.Request) -> httpx2.Response:
            asked.append(request)
            headers = {"retry-after-ms": "1"} | told.headers
            return httpx2.Response(told.status, json=told.body, headers=headers)

        with (
            httpx2.Client(transport=httpx2.MockTransport(answer)) as transport,
            openai.OpenAI(base_url="http://test", api_key="none", http_client=transport) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.models.list()
        return len(asked)

    assert tries(NeverFitsError("more than ever")) == 1
    assert tries(errors.ResourceExhaustedError("full")) > 1


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        (COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * (MAX_MODEL_LEN - 3)}, "max_tokens"),
        (CHATS, {"messages": [{"role": "user", "content": "x " * MAX_MODEL_LEN}]}, "messages"),
        (CHATS, {"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    ],
)
async def test_a_too_long_request_has_openais_error_code(
    path: str, values: dict[str, Any], param: str, api: Api
) -> None:
    """Programs that shorten conversations look for this code or these words."""
    error = await api.refusal(path, **values)
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == param
    words = f"{param}: this model's maximum context length is {MAX_MODEL_LEN} tokens; "
    assert error["message"].startswith(words)


def test_a_too_long_grpc_request_is_an_invalid_argument() -> None:
    call = GenerateCall("", (5,) * 10, SamplingParams(), SpeculationParams())
    with pytest.raises(ContextLengthError) as caught:
        check_against_model(call, 10, 1000, 20)
    told = from_status(to_status(caught.value))
    assert type(told) is errors.InvalidArgumentError
    assert (told.field, told.message) == ("max_tokens", caught.value.message)


def test_an_http_error_is_kept() -> None:
    error = HttpError(418, "no")
    assert from_error(error) is error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/a/model/", 404, "model_not_found"),
    ],
)
async def test_an_unknown_path_or_method_is_refused(
    method: str, path: str, status: int, code: str, api: Api
) -> None:
    answer = await api.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "values"),
    [*LEAST.items(), ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_unknown_model_is_not_found(path: str, values: Any, api: Api, coordinator: Any) -> None:
    error = await api.refusal(path, **values, model="gpt-4", status=404)
    assert error["code"] == "model_not_found"
    assert "a/model" in error["message"]
    assert not coordinator.calls


K = "speculative_decoding.num_speculative_tokens"
USAGE = {"include_usage": False, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"speculative_decoding": {"num_speculative_tokens": 99}}, K),
        ({"speculative_decoding": {"acceptance": "never"}}, "speculative_decoding.acceptance"),
        ({"top_k": 2**40}, "top_k"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"best_of": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": USAGE}, "stream_options.continuous_usage_stats"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 100}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "n"),
    ],
)
async def test_errors_name_the_requests_own_fields(values: dict[str, Any], param: str, api: Api) -> None:
    assert (await api.refusal(**values))["param"] == param


@pytest.mark.parametrize("prompt", [[5] * 4, [[5] * 2] * 2, "def main():", ["def main():"], [[5] * 3, [5]]])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_prompt_reports_are_bounded_over_all_choices(
    prompt: Any, given: Any, param: str, coordinator: Any, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these prompts, or all of a request, have 4 tokens. Ids are counted before any begins."""
    values = {"prompt": prompt, "n": 3, **given}
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 4 * 2 * 3)
    await api.answer(**values)
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 4 * 2 * 3 - 1)
    coordinator.script = None  # nothing is to run
    coordinator.calls.clear()
    assert (await api.refusal(**values))["param"] == param
    assert coordinator.running == 0
    assert not coordinator.calls or isinstance(prompt, str) or prompt == ["def main():"]
