"""Structured outputs through real processes: always valid, and the tokens of plain decoding for every K."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from harness.commands import Done, command
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.refusals import refused
from harness.stacks import RunningStack, own_coordinator, together
from harness.waiting import HANG
from harness.web import Http, connect
from pydantic import BaseModel, Field

from paceline.client import Client, GenerationResult, StructuredOutputs

KS: tuple[Any, ...] = (0, 2, 5, "auto")
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 21},
    "filtered": {"temperature": 1.3, "seed": 22, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2},
}
REGEX = r"[a-z]{2,10}(_[a-z]{2,8}){1,3}\(\) -> (int|str), [0-9]{3}"
CHOICE = ["yes", "no", "no idea", "def main", 'a "quoted" one\n', "naïve 😀"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,12}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "ratio": {"type": ["number", "null"], "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "count", "ratio", "tags", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                        "additionalProperties": False}},
}  # fmt: skip
GRAMMAR = """
start: sum
sum: term (("+" | "-") term){1,3}
term: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
TERM = r"([1-9][0-9]{0,3}|\([1-9][0-9]{0,3}\*[1-9][0-9]{0,3}\))"


def follows_schema(text: str) -> bool:
    return bool(jsonschema_rs.is_valid(SCHEMA, json.loads(text)))


STRUCTURES: Mapping[str, tuple[StructuredOutputs, Callable[[str], Any]]] = {
    "regex": (StructuredOutputs(regex=REGEX), lambda text: re.fullmatch(REGEX, text)),
    "choice": (StructuredOutputs(choice=CHOICE), lambda text: text in CHOICE),
    "json": (StructuredOutputs(json=SCHEMA, disable_any_whitespace=True), follows_schema),
    "grammar": (
        StructuredOutputs(grammar=GRAMMAR),
        lambda text: re.fullmatch(f"{TERM}([+-]{TERM}){{1,3}}", text),
    ),
}


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> Ids:
    return oracle.encode(SOURCE)[:50]


def generate(client: Client, prompt: Ids, name: str, k: Any, **changes: Any) -> GenerationResult:
    speculation = {"num_speculative_tokens": k} | {
        key: changes.pop(key) for key in ("acceptance",) if key in changes
    }
    sampling = {"max_tokens": 300, "structured_outputs": STRUCTURES[name][0], **changes}
    return client.generate(prompt, sampling, speculation=speculation, timeout=HANG)


def check(name: str, result: GenerationResult, eos: int) -> None:
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert result.token_ids[-1] == eos
    assert STRUCTURES[name][1](result.text), result.text


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structured_tokens_are_valid_and_equal_for_every_k(
    client: Client, oracle: Oracle, prompt: Ids, name: str, sampling: str
) -> None:
    (eos,) = oracle.eos_token_ids
    results = [generate(client, prompt, name, k, **SAMPLINGS[sampling]) for k in KS]
    for result in results:
        check(name, result, eos)
    assert len({result.token_ids for result in results}) == 1
    assert results[2].speculative_decoding.num_draft_tokens > 0


def test_forced_texts_are_drafted_and_foreseen(client: Client, prompt: Ids) -> None:
    """Between the values a schema leaves little choice: the draft, masked as well, is nearly always right."""
    results = [generate(client, prompt, "json", 4, temperature=1.0, seed=seed) for seed in range(6)]
    counts = [result.speculative_decoding for result in results]
    accepted = sum(count.num_accepted_draft_tokens for count in counts)
    assert accepted / sum(count.num_draft_tokens for count in counts) > 0.5
    assert sum(count.num_lookahead_hits for count in counts) > 0


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_ratio_modes_give_valid_structures(
    client: Client, oracle: Oracle, prompt: Ids, name: str, mode: str
) -> None:
    (eos,) = oracle.eos_token_ids
    for seed in range(3):
        check(name, generate(client, prompt, name, 3, acceptance=mode, seed=seed), eos)


def test_json_object_gives_any_json_object(client: Client, prompt: Ids) -> None:
    structure = {"json_object": True, "disable_any_whitespace": True}
    for seed in range(4):
        sampling = {"max_tokens": 400, "seed": seed, "structured_outputs": structure}
        result = client.generate(prompt, sampling, timeout=HANG)
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)
        else:
            assert result.text.startswith("{")


def test_structured_and_free_requests_run_together(client: Client, oracle: Oracle, prompt: Ids) -> None:
    (eos,) = oracle.eos_token_ids
    free = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}

    def unconstrained(k: int) -> Ids:
        speculation = {"num_speculative_tokens": k}
        return client.generate(prompt, free, speculation=speculation, timeout=HANG).token_ids

    alone = unconstrained(0)
    wanted = {
        (name, seed): generate(client, prompt, name, 0, seed=seed).token_ids
        for name in STRUCTURES
        for seed in (31, 32)
    }
    constrained = together(
        [
            *(lambda n=name, s=seed: generate(client, prompt, n, 4, seed=s) for name, seed in wanted),
            *(lambda k=k: unconstrained(k) for k in (0, 2, 4, 5)),
        ],
        at_once=12,
    )
    for (name, seed), result in zip(wanted, constrained[:8], strict=True):
        check(name, result, eos)
        assert result.token_ids == wanted[name, seed]
    assert constrained[8:] == [alone] * 4


def test_every_completion_follows_the_structure(client: Client, prompt: Ids) -> None:
    result = generate(client, prompt, "regex", 3, n=4, seed=3, temperature=1.2)
    assert len({output.text for output in result.outputs}) > 1
    assert all(re.fullmatch(REGEX, output.text) for output in result.outputs)


def test_min_tokens_yields_to_a_finished_structure(client: Client, oracle: Oracle, prompt: Ids) -> None:
    (eos,) = oracle.eos_token_ids
    for k in (0, 4):
        check("choice", generate(client, prompt, "choice", k, temperature=0, min_tokens=100), eos)


def test_a_truncated_structure_ends_by_length(client: Client, prompt: Ids) -> None:
    result = generate(client, prompt, "json", 4, temperature=0, max_tokens=5)
    assert result.finish_reason == "length"
    assert result.text.startswith('{"name"')


def test_structured_log_probabilities_are_the_models_own(client: Client, prompt: Ids) -> None:
    """Raw, as always: those of a request without a structure, and finite."""
    free = client.generate(prompt, {"max_tokens": 1, "temperature": 0, "logprobs": 3}, timeout=HANG)
    result = generate(client, prompt, "choice", 3, temperature=0, logprobs=3)
    first = result.logprobs[0]
    both = first.keys() & free.logprobs[0].keys()
    assert len(both) >= 3
    for token in both:
        assert first[token].logprob == pytest.approx(free.logprobs[0][token].logprob, abs=1e-4)
    assert first[result.token_ids[0]].rank >= 1
    assert all(entry.logprob > -1e9 for entry in first.values())


@pytest.mark.parametrize(
    ("structure", "field"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": "(a{1000}){1000}"}, "structured_outputs.regex"),
        ({"json": {"type": "thing"}}, "structured_outputs.json"),
        ({"json": {"not": {}}}, "structured_outputs.json"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar"),
    ],
)
def test_an_unsupported_structure_is_refused(
    stack: RunningStack, prompt: Ids, structure: dict[str, Any], field: str
) -> None:
    sampling = {"max_tokens": 5, "structured_outputs": structure}
    for _ in range(2):
        with refused(field):
            stack.client.generate(prompt, sampling, timeout=HANG)
    stack.good_request()


# ---- on the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_command_line_accepts_every_structure(stack: RunningStack, tmp_path: Path, name: str) -> None:
    structure, valid = STRUCTURES[name]
    file = tmp_path / "structure"
    file.write_text(str(structure.json or structure.grammar))
    options = {
        "regex": ["--regex", REGEX],
        "choice": [word for text in CHOICE for word in ("--choice", text)],
        "json": ["--json-schema", str(file)],
        "grammar": ["--grammar", str(file)],
    }[name]
    answer = generate_by_command(stack, *options)
    assert answer.returncode == 0, answer.stderr
    output = json.loads(answer.stdout)
    assert output["finish_reason"] == "stop"
    assert valid(output["text"])


def test_the_command_line_names_a_bad_structure(stack: RunningStack, tmp_path: Path) -> None:
    for options, word in (
        (["--regex", "("], "structured_outputs.regex"),
        (["--regex", "a", "--choice", "b"], "exactly one of"),
        (["--json-schema", str(tmp_path / "nothing")], "--json-schema"),
    ):
        answer = generate_by_command(stack, *options)
        assert answer.returncode != 0
        assert word in answer.stderr
        assert "Traceback" not in answer.stderr


def generate_by_command(stack: RunningStack, *options: str) -> Done:
    words = ["generate", "x = ", "--json", "--temperature", "0", "--max-tokens", "900", *options]
    return command(*words, "--address", stack.address)


# ---- over HTTP -------------------------------------------------------------------------------------------


class Inner(BaseModel):
    on: bool


class Answer(BaseModel):
    """What `parse` of OpenAI's client makes of a chat's text."""

    word: str = Field(pattern="^[a-z]{1,8}$")
    number: int = Field(ge=0, le=99)
    inner: Inner


def test_http_completions_accept_both_structure_forms(http: Http) -> None:
    given: dict[str, Any] = {"model": http.model, "prompt": "x = ", "max_tokens": 900, "seed": 3}
    by_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    got = http.openai.completions.create(**given, extra_body={"response_format": by_schema})
    other = http.openai.completions.create(**given, extra_body={"structured_outputs": {"json": SCHEMA}})
    assert got.choices[0].text == other.choices[0].text
    assert got.choices[0].finish_reason == "stop"
    assert follows_schema(got.choices[0].text)
    chosen = http.openai.completions.create(**given, extra_body={"structured_outputs": {"choice": CHOICE}})
    assert chosen.choices[0].text in CHOICE


def test_a_bad_schema_is_refused_by_field_and_status(http: Http) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        http.complete("x", extra_body={"response_format": bad})
    assert caught.value.param == "response_format.json_schema.schema"


def test_openais_client_parses_a_chat_into_a_pydantic_model(
    stack: RunningStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    workers = [stack.stack.address_of(role) for role in ("target", "draft")]
    with own_coordinator(stack.pair, workers[:1], workers[1:], chat_template=str(template)) as own:
        for chat in connect(own.supervisor.status("coordinator").http_address):
            answer = chat.openai.chat.completions.parse(
                model=chat.model,
                messages=[{"role": "user", "content": "A number?"}],
                response_format=Answer,
                max_tokens=900,
                temperature=0,
            )
            parsed = answer.choices[0].message.parsed
            assert isinstance(parsed, Answer)
            assert re.fullmatch("[a-z]{1,8}", parsed.word)
            loose = chat.chat(
                [{"role": "user", "content": "A number?"}],
                response_format={"type": "json_object"},
                max_tokens=20,
                temperature=0,
            )
            assert (loose.choices[0].message.content or "").startswith("{")
