"""The end of a generation: stop strings, stop tokens, end-of-sequence, lengths."""

from __future__ import annotations

from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.waiting import HANG

from paceline.client import Client, GenerationResult

KS = (0, 5)
LENGTH = 40
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> Ids:
    return oracle.encode(SOURCE)[:80]


@pytest.fixture(scope="module")
def free(oracle: Oracle, client: Client, prompt: Ids) -> GenerationResult:
    """The same request with nothing to stop it."""
    return generate(client, prompt, 0)


def generate(client: Client, prompt: Ids, k: int, **sampling: Any) -> GenerationResult:
    parameters = SAMPLING | sampling
    return client.generate(prompt, parameters, speculation={"num_speculative_tokens": k}, timeout=HANG)


def lengths_of_text(oracle: Oracle, prompt: Ids, tokens: Ids) -> list[int]:
    """Characters of the generated text after each token."""
    before = len(oracle.decode(prompt))
    return [len(oracle.decode(prompt + tokens[: i + 1])) - before for i in range(len(tokens))]


def stop_across_a_border(oracle: Oracle, prompt: Ids, free: GenerationResult) -> tuple[str, int]:
    """A stop string whose first occurrence spans two tokens, and how many tokens complete it."""
    ends = lengths_of_text(oracle, prompt, free.token_ids)
    for i in range(3, len(ends) - 1):
        if "\ufffd" in free.text[: ends[i + 1]] or not ends[i - 1] < ends[i] < ends[i + 1]:
            continue
        stop = free.text[ends[i - 1] : ends[i] + 1]
        if free.text.find(stop) == ends[i - 1]:
            return stop, i + 2
    pytest.skip("this model's text has no such string")


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_token_borders_ends_the_text(
    oracle: Oracle, client: Client, prompt: Ids, free: GenerationResult, k: int, include: bool
) -> None:
    """No chunk shows a part of what is cut off."""
    stop, count = stop_across_a_border(oracle, prompt, free)
    text = free.text[: free.text.find(stop) + (len(stop) if include else 0)]
    parameters = {**SAMPLING, "stop": [stop], "include_stop_str_in_output": include}
    shown = ""
    stream = client.stream(prompt, parameters, speculation={"num_speculative_tokens": k}, timeout=HANG)
    for chunk in stream:
        shown += chunk.text
        assert text.startswith(shown)
    result = stream.result
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert shown == result.text == text
    assert result.token_ids == free.token_ids[:count]


@pytest.mark.parametrize("k", KS)
def test_an_incomplete_stop_string_is_shown_as_text(
    client: Client, prompt: Ids, free: GenerationResult, k: int
) -> None:
    """Text that is held back as the possible beginning of a stop string is shown in the end."""
    almost = free.text[-3:] + "\x00never"
    result = generate(client, prompt, k, stop=[almost, free.text[2:6] + "\x00"])
    assert result.text == free.text
    assert (result.finish_reason, result.stop_reason) == ("length", None)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_stop_token_ids_end_the_sequence(
    client: Client, prompt: Ids, free: GenerationResult, k: int, at: int
) -> None:
    token = free.token_ids[at]
    first = free.token_ids.index(token)
    result = generate(client, prompt, k, stop_token_ids=[token])
    assert result.token_ids == free.token_ids[: first + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", token)
    assert free.text.startswith(result.text)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_max_tokens_is_exact(client: Client, prompt: Ids, free: GenerationResult, k: int, count: int) -> None:
    """Clipped inside a proposal too, and no draft token is asked for beyond it."""
    result = generate(client, prompt, k, max_tokens=count)
    assert result.token_ids == free.token_ids[:count]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("k", KS)
def test_ignore_eos_and_min_tokens_equal_generate(
    oracle: Oracle, client: Client, prompt: Ids, k: int
) -> None:
    """`min_tokens` masks what would end the sequence, as transformers' min_new_tokens does."""
    (eos,) = oracle.eos_token_ids
    bias = ((eos, 100.0),)
    ended = generate(client, prompt, k, logit_bias={eos: 100.0}, ignore_eos=False)
    assert ended.token_ids == (eos,)
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
    ignoring = generate(client, prompt, k, logit_bias={eos: 100.0}, max_tokens=6)
    assert ignoring.token_ids == (eos,) * 6
    late = generate(client, prompt, k, logit_bias={eos: 100.0}, ignore_eos=False, min_tokens=9)
    want = oracle.greedy(prompt, LENGTH, bias=bias, min_new_tokens=9)
    assert len(want) == 10
    assert late.token_ids == want
    assert late.finish_reason == "stop"


@pytest.mark.parametrize("k", KS)
def test_min_tokens_masks_stop_tokens_too(
    client: Client, prompt: Ids, free: GenerationResult, k: int
) -> None:
    token = free.token_ids[0]
    result = generate(client, prompt, k, stop_token_ids=[token], min_tokens=5)
    assert token not in result.token_ids[:5]
    assert len(result.token_ids) > 5


@pytest.mark.parametrize("k", KS)
def test_generation_ends_at_the_models_length(oracle: Oracle, client: Client, k: int) -> None:
    """The last rounds have less room than K; `max_tokens` None fills the model exactly."""
    (model,) = client.models()
    ids = oracle.encode(SOURCE)
    room = 11
    long = (ids * (model.max_model_len // len(ids) + 1))[: model.max_model_len - room]
    result = generate(client, long, k, max_tokens=None)
    assert (len(result.token_ids), result.finish_reason) == (room, "length")
    assert generate(client, long, 0, max_tokens=room).token_ids == result.token_ids
