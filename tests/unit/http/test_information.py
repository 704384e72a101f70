"""Models, health, version, metrics, the OpenAPI document, and tokenization."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from coordinator.api.http.app import make_app
from coordinator.api.http.openai.schema.bodies import ChatRequest, CompletionRequest, TokenizeRequest
from coordinator.api.http.openai.schema.document import document
from coordinator.api.http.openai.usage import summed
from coordinator.sequence.stats import SpeculationStats
from tests.sim.rounds import judged_chain
from tests.unit.http.api import COMPLETIONS, MESSAGES, Api


async def test_models_are_listed(api: Api) -> None:
    listed = (await api.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("a/model", "model", 2048)
    assert (model["root"], model["parent"]) == ("files/of/the/target", None)
    assert (await api.get("/v1/models/")).json() == listed
    assert (await api.get("/v1/models/a/model")).json() == model
    assert (await api.get("/v1/models/a%2Fmodel")).json() == model


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
async def test_health_follows_readiness(method: str, path: str, api: Api, coordinator: Any) -> None:
    assert (await api.request(method, path)).status_code == 200
    coordinator.accepting = False
    answer = await api.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")


async def test_version_is_the_packages(api: Api) -> None:
    assert (await api.get("/version")).json() == {"version": version("paceline")}


OPEN_METRICS = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (f"{OPEN_METRICS}; version=1.0.0; charset=utf-8", OPEN_METRICS),
        (f"{OPEN_METRICS};version=1.0.0,text/plain;q=0.5", OPEN_METRICS),
        ("text/plain", "text/plain"),
        ("*/*", "text/plain"),
        (f"{OPEN_METRICS}; version=mine", "text/plain"),
    ],
)
async def test_metrics_show_the_counts_in_the_form_asked_for(
    api: Api, coordinator: Any, accept: str, kind: str
) -> None:
    coordinator.metrics.finished["length"] = 3
    coordinator.metrics.failed["UNAVAILABLE"] = 4
    answer = await api.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert answer.text.endswith("# EOF\n") == (kind == OPEN_METRICS)
    lines = set(answer.text.splitlines())
    for name, value in (
        ('num_requests_running{model_name="a/model"}', 1),
        ('num_requests_waiting{model_name="a/model"}', 2),
        ('request_success_total{finished_reason="length",model_name="a/model"}', 3),
        ('request_success_total{finished_reason="stop",model_name="a/model"}', 0),
        ('request_failure_total{code="UNAVAILABLE",model_name="a/model"}', 4),
    ):
        assert f"paceline:{name} {value}.0" in lines
    if kind == OPEN_METRICS:
        families = {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
        assert "paceline:request_success" in families


async def test_metrics_work_without_a_worker(api: Api, coordinator: Any) -> None:
    coordinator.serving = False
    coordinator.found.clear()
    assert (await api.get("/metrics")).status_code == 200
    assert (await api.get("/v1/models")).status_code == 503


async def test_tokenize_and_detokenize_round_trip(api: Api, coordinator: Any) -> None:
    answer = (await api.post("/tokenize", json={"prompt": "def main():"})).json()
    assert answer == {"tokens": [523, 614, 266, 657], "count": 4, "max_model_len": 2048}
    back = await api.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "def main():"}


@pytest.mark.parametrize(
    "asked", [{"prompt": "x"}, {"messages": MESSAGES}], ids=lambda asked: next(iter(asked))
)
async def test_tokenize_accepts_harmless_defaults(asked: dict[str, Any], api: Api) -> None:
    """vLLM's clients send its defaults."""
    names = ("chat_template", "media_io_kwargs", "mm_processor_kwargs", "tools")
    values = {"continue_final_message": False, "return_token_strs": False, "tools": []}
    plain = await api.answer("/tokenize", **asked)
    for harmless in (dict.fromkeys(names), values):
        assert await api.answer("/tokenize", **asked, **harmless) == plain
    for name in names:
        error = await api.refusal("/tokenize", **asked, **{name: ["x"]})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", ["/tokenize", COMPLETIONS])
async def test_an_empty_model_name_is_the_served_one(path: str, api: Api) -> None:
    for model in ("", None, "a/model"):
        await api.answer(path, prompt="x", model=model)


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
async def test_invalid_tokenize_requests_are_refused(values: dict[str, Any], param: str, api: Api) -> None:
    assert (await api.refusal("/tokenize", **values))["param"] == param


async def test_the_document_has_every_path_and_method(coordinator: Any, api: Api) -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in make_app(coordinator, None).routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    told = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert served - told == {("/openapi.json", "get")}
    assert told <= served
    assert (await api.get("/openapi.json")).json() == document()


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
@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("coordinator.api.http.app", ("torch", "transformers", "huggingface_hub", "opentelemetry")),
        ("coordinator.main", ("starlette", "uvicorn", "opentelemetry")),
    ],
)
def test_only_what_is_needed_is_imported(module: str, unneeded: tuple[str, ...]) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {unneeded}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_summed_counts_equal_those_of_one_sequence() -> None:
    rounds = [[(4, 2), (4, 4), (0, 0)], [(2, 1), (3, 0)], []]
    whole, each = SpeculationStats(), []
    for of_one in rounds:
        stats = SpeculationStats()
        for num_draft, num_accepted in of_one:
            told = judged_chain(num_draft, num_accepted)
            for counts in (whole, stats):
                counts.record(told)
        each.append(stats)
    assert summed(each) == whole
