"""Sampling defaults of a model's generation_config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.app import make_app
from coordinator.api.sampling_defaults import SamplingDefaults, load, of_file
from paceline.core import limits
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InvalidArgumentError

FILE = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2040,
    "do_sample": True,
    "eos_token_id": 1,
    "transformers_version": "5.0",
}
SAMPLED = {name: FILE[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
MESSAGES = [{"role": "user", "content": "def main():"}]


def config(folder: Path, **changes: Any) -> CoordinatorConfig:
    return CoordinatorConfig(targets=("a:1",), tokenizer=str(folder), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE))
    return tmp_path


def test_the_files_values_are_used_and_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load(config(folder)) == SamplingDefaults(SAMPLED, 2040)
    (line,) = caplog.messages
    for words in ("temperature 0.6", "top_p 0.95", "top_k 20", "max_tokens 2040", "--generation-config none"):
        assert words in line


def test_the_setting_none_ignores_the_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load(config(folder, generation_config="none")) == SamplingDefaults()
    assert not caplog.messages


@pytest.mark.parametrize("content", [None, "{}", '{"temperature": null, "max_new_tokens": null}'])
def test_a_model_without_values_has_no_defaults(content: str | None, tmp_path: Path, caplog: Any) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with caplog.at_level(logging.INFO):
        assert load(config(tmp_path)) == SamplingDefaults()
    assert not caplog.messages


def test_the_embedded_pair_keeps_its_defaults() -> None:
    assert load(CoordinatorConfig(targets=("a:1",), tokenizer="embedded:target")) == SamplingDefaults()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        of_file(given)
    assert caught.value.field == "generation_config"
    assert f"its {name} must" in caught.value.description
    assert "`none`" in caught.value.description


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(InvalidArgumentError) as caught:
        load(config(tmp_path))
    assert caught.value.field == "generation_config"


def test_a_temperature_too_low_is_raised() -> None:
    assert of_file({"temperature": 1e-9}).values == {"temperature": limits.MIN_TEMPERATURE}


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        config(Path("x"), generation_config="vllm")
    assert caught.value.field == "generation_config"


@pytest.fixture
async def client(coordinator: Any) -> AsyncIterator[httpx2.AsyncClient]:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    app = make_app(coordinator, template, defaults=SamplingDefaults(SAMPLED, 2040))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as made:
        yield made


@pytest.mark.parametrize(
    ("path", "least"),
    [("/v1/completions", {"prompt": "def main():"}), ("/v1/chat/completions", {"messages": MESSAGES})],
)
async def test_requests_without_values_get_the_files(
    path: str, least: dict[str, Any], client: httpx2.AsyncClient, coordinator: Any
) -> None:
    nulls = dict.fromkeys(SAMPLED)
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for values in ({}, nulls, given):
        assert (await client.post(path, json=least | values)).status_code == 200
    silent, null, said = (call.sampling for call in coordinator.calls)
    for name, value in SAMPLED.items():
        assert getattr(silent, name) == getattr(null, name) == value
        assert getattr(said, name) == given[name]


async def test_an_unlimited_answer_gets_the_files_limit(client: httpx2.AsyncClient, coordinator: Any) -> None:
    """Less where the model's length leaves less room; a completion has its own default."""
    chat = "/v1/chat/completions"
    long = [{"role": "user", "content": "def main():" * 3}]
    for path, values in (
        (chat, {"messages": MESSAGES}),
        (chat, {"messages": long}),
        (chat, {"messages": MESSAGES, "max_tokens": 7}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        assert (await client.post(path, json=values)).status_code == 200
    assert [call.sampling.max_tokens for call in coordinator.calls] == [2040, 2048 - 12, 7, 16]


async def test_a_prompt_without_room_is_still_refused(client: httpx2.AsyncClient) -> None:
    values = {"messages": [{"role": "user", "content": "def main():" * 512}]}
    error = (await client.post("/v1/chat/completions", json=values)).json()["error"]
    assert error["code"] == "context_length_exceeded"
