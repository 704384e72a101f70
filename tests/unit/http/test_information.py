"""Models, health, version, metrics, the OpenAPI document, and tokenization."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics import parser as openmetrics

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.app import make_app
from coordinator.api.http.openai.schema.bodies import ChatRequest, CompletionRequest, TokenizeRequest
from coordinator.api.http.openai.schema.document import document
from coordinator.api.http.openai.usage import summed
from coordinator.sequence.round_record import RoundRecord
from coordinator.sequence.stats import SpeculationStats
from paceline.core.errors import UnavailableError


async def test_models_are_listed(client: httpx2.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("a/model", "model", 2048)
    assert (model["root"], model["parent"]) == ("files/of/the/target", None)
    assert (await client.get("/v1/models/")).json() == listed
    assert (await client.get("/v1/models/a/model")).json() == model
    assert (await client.get("/v1/models/a%2Fmodel")).json() == model


async def test_health_follows_readiness(client: httpx2.AsyncClient, coordinator: Any) -> None:
    assert (await client.get("/health")).status_code == 200
    coordinator.accepting = False
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_answers_like_health(method: str, client: httpx2.AsyncClient, coordinator: Any) -> None:
    for accepting in (True, False):
        coordinator.accepting = accepting
        ping, health = await client.request(method, "/ping"), await client.get("/health")
        assert (ping.status_code, ping.json()) == (health.status_code, health.json())


async def test_version_is_the_packages(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": version("paceline")}


async def test_metrics_show_the_counts(client: httpx2.AsyncClient, coordinator: Any) -> None:
    coordinator.metrics.finished["length"] = 3
    coordinator.metrics.failed["UNAVAILABLE"] = 4
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = set(answer.text.splitlines())
    for name, value in (
        ('num_requests_running{model_name="a/model"}', 1),
        ('num_requests_waiting{model_name="a/model"}', 2),
        ('request_success_total{finished_reason="length",model_name="a/model"}', 3),
        ('request_success_total{finished_reason="stop",model_name="a/model"}', 0),
        ('request_failure_total{code="UNAVAILABLE",model_name="a/model"}', 4),
    ):
        assert f"paceline:{name} {value}.0" in lines


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", "application/openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
        ("text/plain", "text/plain"),
        ("*/*", "text/plain"),
        ("application/openmetrics-text; version=mine", "text/plain"),
    ],
)
async def test_metrics_use_openmetrics_on_request(
    client: httpx2.AsyncClient, coordinator: Any, accept: str, kind: str
) -> None:
    coordinator.metrics.finished["length"] = 3
    answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert answer.text.endswith("# EOF\n") == (kind == "application/openmetrics-text")
    line = 'paceline:request_success_total{finished_reason="length",model_name="a/model"} 3.0'
    assert line in answer.text.splitlines()
    if kind == "application/openmetrics-text":
        families = {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
        assert "paceline:request_success" in families


async def test_metrics_work_without_a_worker(client: httpx2.AsyncClient, coordinator: Any) -> None:
    def nobody() -> Any:
        raise UnavailableError("no target worker is available yet")

    coordinator.serving, coordinator.target_info = False, nobody
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 503


async def test_tokenize_and_detokenize_round_trip(client: httpx2.AsyncClient, coordinator: Any) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "def main():"})).json()
    assert answer == {"tokens": [523, 614, 266, 657], "count": 4, "max_model_len": 2048}
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "def main():"}


async def test_tokenize_accepts_harmless_defaults(
    coordinator: Any, make_client: Callable[..., httpx2.AsyncClient]
) -> None:
    """vLLM's clients send its defaults."""
    names = ("chat_template", "media_io_kwargs", "mm_processor_kwargs", "tools")
    values = {"continue_final_message": False, "return_token_strs": False, "tools": []}
    for asked in ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}):
        async with make_client(coordinator, ChatTemplate("{{ messages[0].content }}")) as client:
            plain = await client.post("/tokenize", json=asked)
            for harmless in (dict.fromkeys(names), values):
                assert (await client.post("/tokenize", json=asked | harmless)).json() == plain.json()
            for name in names:
                error = (await client.post("/tokenize", json=asked | {name: ["x"]})).json()["error"]
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")


async def test_an_empty_model_name_is_the_served_one(client: httpx2.AsyncClient) -> None:
    for model in ("", None, "a/model"):
        for path, asked in (("/tokenize", {"prompt": "x"}), ("/v1/completions", {"prompt": "x"})):
            assert (await client.post(path, json={**asked, "model": model})).status_code == 200


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x", "return_token_strings": None}, "return_token_strings"),
    ],
)
async def test_invalid_tokenize_requests_are_refused(
    values: dict[str, Any], param: str, client: httpx2.AsyncClient
) -> None:
    answer = await client.post("/tokenize", json=values)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_document_has_every_path_and_method(coordinator: Any, client: httpx2.AsyncClient) -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in make_app(coordinator, None).routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    told = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert served - told == {("/openapi.json", "get")}
    assert told <= served
    assert (await client.get("/openapi.json")).json() == document()


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, TokenizeRequest])
def test_the_document_has_harmless_parameters_with_values(model: Any) -> None:
    """Clients checked against the document must be accepted."""
    schema = document()["components"]["schemas"][model.__name__]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {*model.model_fields, *model.UNSUPPORTED}
    for name, harmless in ((name, each.harmless) for name, each in model.UNSUPPORTED.items()):
        values = schema["properties"][name]["enum"]
        assert [value for value in values if value not in harmless] == [None]
        assert [value for value in harmless if value not in values] == []
        assert len(values) == len({repr(value).removesuffix(".0") for value in values})


@pytest.mark.slow
def test_http_needs_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "huggingface_hub")
    code = f"import sys, coordinator.api.http.app; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_coordinator_without_http_does_not_load_it() -> None:
    code = "import sys, coordinator.main; sys.exit(any(n in sys.modules for n in ('starlette', 'uvicorn')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_summed_counts_equal_those_of_one_sequence() -> None:
    rounds = [[(4, 2), (4, 4), (0, 0)], [(2, 1), (3, 0)], []]
    whole, each = SpeculationStats(), []
    for of_one in rounds:
        stats = SpeculationStats()
        for num_draft, num_accepted in of_one:
            told = RoundRecord(num_draft=num_draft, num_accepted=num_accepted, num_tokens=num_accepted + 1)
            for counts in (whole, stats):
                counts.record(told)
        each.append(stats)
    assert summed(each) == whole
