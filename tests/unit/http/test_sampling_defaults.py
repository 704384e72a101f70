"""Sampling defaults of a model's generation_config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from coordinator.api.sampling_defaults import SamplingDefaults, load, of_file
from paceline.core import limits
from paceline.core.config import CoordinatorConfig
from tests.unit.http.api import CHATS, COMPLETIONS, Api, both_paths

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
    with refused("generation_config", f"its {name} must.*`none`"):
        of_file(given)


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[")
    with refused("generation_config"):
        load(config(tmp_path))


def test_a_temperature_too_low_is_raised() -> None:
    assert of_file({"temperature": 1e-9}).values == {"temperature": limits.MIN_TEMPERATURE}


def test_unknown_settings_are_refused() -> None:
    with refused("generation_config"):
        config(Path("x"), generation_config="vllm")


@pytest.fixture
async def api(coordinator: Any) -> AsyncIterator[Api]:
    """With the file's values, and a template that adds nothing."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with Api(coordinator, template, defaults=SamplingDefaults(SAMPLED, 2040)) as made:
        yield made


@both_paths
async def test_requests_without_values_get_the_files(path: str, api: Api, coordinator: Any) -> None:
    nulls = dict.fromkeys(SAMPLED)
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for values in ({}, nulls, given):
        await api.answer(path, **values)
    silent, null, said = (call.sampling for call in coordinator.calls)
    for name, value in SAMPLED.items():
        assert getattr(silent, name) == getattr(null, name) == value
        assert getattr(said, name) == given[name]


@pytest.mark.parametrize(
    ("path", "values", "limit"),
    [
        (CHATS, {}, 2040),
        (CHATS, {"messages": [{"role": "user", "content": "def main():" * 3}]}, 2048 - 12),
        (CHATS, {"max_tokens": 7}, 7),
        (COMPLETIONS, {}, 16),
    ],
    ids=["the file's", "what the model's length leaves", "the request's", "a completion's default"],
)
async def test_an_unlimited_answer_gets_the_files_limit(
    path: str, values: Any, limit: int, api: Api, coordinator: Any
) -> None:
    await api.answer(path, **values)
    assert coordinator.calls[0].sampling.max_tokens == limit


async def test_a_prompt_without_room_is_still_refused(api: Api) -> None:
    messages = [{"role": "user", "content": "def main():" * 512}]
    assert (await api.refusal(CHATS, messages=messages))["code"] == "context_length_exceeded"
