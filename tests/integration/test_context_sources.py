"""Context sources through real processes: the tokens of plain decoding, counted by source."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.stacks import together
from harness.tiers import mostly_full
from harness.waiting import HANG

from paceline.client import Client, GenerationResult, InvalidArgumentError

LIST = "".join(f"def get_{name}(self):\n    return self.{name}\n\n" for name in ("width", "height", "depth"))
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.6, "seed": 31},
    {"temperature": 1.0, "seed": 32, "top_p": 0.9, "repetition_penalty": 1.05},
)
SOURCES = ("prompt-lookup", "suffix", "ngram")
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["temperature", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> Ids:
    return oracle.encode(LIST)


def generate(client: Client, prompt: Ids, sampling: dict[str, Any], **speculation: Any) -> GenerationResult:
    wanted = {"max_tokens": 40, "ignore_eos": True} | sampling
    return client.generate(prompt, wanted, speculation=speculation, timeout=HANG)


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("k", mostly_full([4, 1, 2, 8, 16], count=1))
def test_sources_give_the_tokens_of_plain_decoding(client: Client, prompt: Ids, k: int, at_once: int) -> None:
    prompts = [prompt[start:] for start in (0, 3)]
    cases = list(itertools.product(prompts, SAMPLINGS))
    plain = [generate(client, *case, num_speculative_tokens=0).token_ids for case in cases]
    asked = [(source, case) for source in SOURCES for case in cases]
    results = together(
        [
            lambda source=source, case=case: generate(client, *case, num_speculative_tokens=k, drafter=source)
            for source, case in asked
        ],
        at_once,
    )
    assert [result.token_ids for result in results] == plain * len(SOURCES)
    for (source, _), result in zip(asked, results, strict=True):
        assert [counts.source for counts in result.speculative_decoding.by_source] in ([], [source])
    for source in SOURCES:
        of_source = [r.speculative_decoding for (s, _), r in zip(asked, results, strict=True) if s == source]
        assert sum(counts.num_accepted_draft_tokens for counts in of_source) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_proposed_and_accepted(client: Client, prompt: Ids, temperature: float) -> None:
    sampling = {
        "temperature": temperature,
        "seed": 3,
        "ignore_eos": False,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    }
    plain = generate(client, prompt, sampling, num_speculative_tokens=0)
    assert json.loads(plain.text)["unit"] in ("celsius", "fahrenheit")
    for drafter in ("grammar", None):
        result = generate(client, prompt, sampling, num_speculative_tokens=6, drafter=drafter)
        assert result.token_ids == plain.token_ids
    result = generate(client, prompt, sampling, num_speculative_tokens=6, drafter="grammar")
    (counts,) = result.speculative_decoding.by_source
    assert counts.source == "grammar"
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens >= len('{"temperature":') // 4
    assert result.speculative_decoding.num_rounds < len(result.token_ids)


def test_choices_of_one_request_have_their_own_sources(client: Client, prompt: Ids) -> None:
    wanted = {"max_tokens": 24, "temperature": 0.8, "seed": 4, "n": 2, "ignore_eos": True}
    plain = client.generate(prompt, wanted, speculation={"num_speculative_tokens": 0}, timeout=HANG)
    result = client.generate(
        prompt, wanted, speculation={"num_speculative_tokens": 4, "drafter": "ngram"}, timeout=HANG
    )
    assert [one.token_ids for one in result.outputs] == [one.token_ids for one in plain.outputs]


def test_an_answer_helps_the_next_request(client: Client, oracle: Oracle) -> None:
    """Its own text has no match at first; another salt has none of the answer."""
    prompt = oracle.encode("import collections\n\n\n")
    sampling = {"temperature": 0.0, "max_tokens": 32}

    def ask(salt: str) -> Any:
        wanted = {"ignore_eos": True} | sampling
        speculation = {"num_speculative_tokens": 8, "drafter": "suffix"}
        return client.generate(
            prompt, wanted, speculation=speculation, cache_salt=salt, timeout=HANG
        ).speculative_decoding

    first, second, other = ask("a"), ask("a"), ask("b")
    assert second.num_rounds < first.num_rounds
    assert second.num_accepted_draft_tokens > first.num_accepted_draft_tokens
    assert other == first


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 1.5}, {"top_k": 3, "top_p": 0.5}])
def test_the_drafts_own_sampling_changes_no_token(
    client: Client, prompt: Ids, changes: dict[str, Any]
) -> None:
    of_draft = {f"draft_{name}": value for name, value in changes.items()}
    sampling = {"temperature": 0.8, "seed": 6}
    plain = generate(client, prompt, sampling, num_speculative_tokens=0)
    same, other = (
        generate(client, prompt, sampling, num_speculative_tokens=4, drafter="draft", **more)
        for more in ({}, of_draft)
    )
    assert same.token_ids == other.token_ids == plain.token_ids
    assert other.speculative_decoding != same.speculative_decoding


@pytest.mark.parametrize(
    ("speculation", "field"),
    [
        ({"drafter": "oracle"}, "drafter"),
        ({"drafter": ""}, "drafter"),
        ({"drafter": "suffix", "prompt_lookup": True}, "drafter"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_max": 65}, "prompt_lookup_max"),
        ({"prompt_lookup_min": 9, "prompt_lookup_max": 8}, "prompt_lookup_min"),
        ({"prompt_lookup_min": 17}, "prompt_lookup_min"),
        ({"draft_temperature": -1.0}, "draft_temperature"),
        ({"draft_top_k": -2}, "draft_top_k"),
        ({"draft_top_p": 0.0}, "draft_top_p"),
    ],
)
def test_a_wrong_source_is_refused_by_name(
    client: Client, prompt: Ids, speculation: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        generate(client, prompt, {}, **({"num_speculative_tokens": 4} | speculation))
    assert refused.value.field == field


def test_a_draft_that_draws_is_refused_at_temperature_0(client: Client, prompt: Ids) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        generate(client, prompt, {"temperature": 0.0}, num_speculative_tokens=4, draft_top_k=3)
    assert refused.value.field == "draft_top_k"
