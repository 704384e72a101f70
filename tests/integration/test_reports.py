"""Reports besides the tokens: logprobs, prompt_logprobs, echo, and n completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE, TEXTS
from harness.waiting import HANG

from paceline.client import Client, GenerationResult, Logprob
from paceline.core import limits
from paceline.engine.scheduling.planner import SCORED_ROWS

TOLERANCE = 1e-4
KS = (0, 3)


def generate(
    client: Client, prompt: Ids | str, k: int, mode: str = "coupled", **sampling: Any
) -> GenerationResult:
    parameters = {"max_tokens": 24, "seed": 5, **sampling}
    speculation = {"num_speculative_tokens": k, "acceptance": mode}
    return client.generate(prompt, parameters, speculation=speculation, timeout=HANG)


def check_position(row: torch.Tensor, position: Mapping[int, Logprob], token_id: int, count: int) -> None:
    """`row` float64 [V]: the model's log-probabilities there."""
    assert next(iter(position)) == token_id
    for token, entry in position.items():
        assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
    best = row.topk(max(count, 1)).values
    told = sorted((entry.logprob for entry in position.values()), reverse=True)
    assert max(count, 1) <= len(position) <= count + 1
    if count:
        assert told[:count] == pytest.approx(best.tolist(), abs=TOLERANCE)
    above, equal = int((row > row[token_id] + TOLERANCE).sum()), int((row >= row[token_id] - TOLERANCE).sum())
    assert above + 1 <= position[token_id].rank <= equal


def log_probabilities(oracle: Oracle, prompt: Ids, tokens: Sequence[int]) -> torch.Tensor:
    """float64 [len(tokens), V]: before each of `tokens`, by transformers' forward."""
    return oracle.logits(prompt, tokens[:-1]).double().log_softmax(-1)


@pytest.mark.parametrize(("mode", "count"), [("coupled", 20), ("rejection", 1), ("block", 0)])
@pytest.mark.parametrize("k", KS)
def test_logprobs_equal_transformers(oracle: Oracle, client: Client, k: int, mode: str, count: int) -> None:
    """They are the model's own, also where the request reshapes the distribution."""
    prompt = oracle.encode(SOURCE)[:60]
    reshaped = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}
    result = generate(client, prompt, k, mode, logprobs=count, **reshaped)
    assert (result.speculative_decoding.num_accepted_draft_tokens > 0) == (k > 0)
    rows = log_probabilities(oracle, prompt, result.token_ids)
    for row, position, token_id in zip(rows, result.logprobs, result.token_ids, strict=True):
        check_position(row, position, token_id, count)
        for token, entry in position.items():
            assert entry.decoded_token == oracle.tokenizer.decode([token])
    total = sum(float(row[token]) for row, token in zip(rows, result.token_ids, strict=True))
    assert result.cumulative_logprob == pytest.approx(total, abs=TOLERANCE * len(rows))


def test_logprobs_are_clipped_with_the_tokens(oracle: Oracle, client: Client) -> None:
    prompt = oracle.encode(SOURCE)[:60]
    free = generate(client, prompt, 3, logprobs=2)
    ended = generate(client, prompt, 3, logprobs=2, stop_token_ids=[free.token_ids[6]])
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) <= 7
    assert [list(position) for position in ended.logprobs] == [
        list(position) for position in free.logprobs[: len(ended.token_ids)]
    ]


@pytest.mark.parametrize("length", [1, 2, 60, SCORED_ROWS + 1, 450])
@pytest.mark.parametrize("k", KS)
def test_prompt_logprobs_equal_transformers(oracle: Oracle, client: Client, k: int, length: int) -> None:
    """Around the border of a scored chunk, and over several chunks."""
    prompt = oracle.encode(SOURCE)[:length]
    assert len(prompt) == length
    result = generate(client, prompt, k, prompt_logprobs=20)
    assert result.prompt_token_ids == prompt
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == length
    rows = log_probabilities(oracle, prompt[:1], prompt[1:]) if length > 1 else ()
    for row, position, token_id in zip(rows, result.prompt_logprobs[1:], prompt[1:], strict=True):
        assert position is not None
        check_position(row, position, token_id, 20)
    assert result.token_ids == generate(client, prompt, k).token_ids


@pytest.mark.parametrize("text", TEXTS)
def test_echo_puts_the_prompt_before_the_text(client: Client, text: str) -> None:
    plain, echoed = generate(client, text, 3), generate(client, text, 3, echo=True)
    assert echoed.text == text + plain.text
    assert echoed.token_ids == plain.token_ids
    assert echoed.prompt_token_ids == client.tokenize(text)
    assert plain.prompt_token_ids is None


def test_echo_decodes_a_prompt_of_token_ids(oracle: Oracle, client: Client) -> None:
    prompt = oracle.encode(SOURCE)[:20]
    assert generate(client, prompt, 3, echo=True).text.startswith(oracle.decode(prompt))


@pytest.mark.parametrize("k", KS)
def test_n_completions_equal_n_requests(oracle: Oracle, client: Client, k: int) -> None:
    prompt = oracle.encode(SOURCE)[:40]
    result = generate(client, prompt, k, n=4, logprobs=1)
    assert [output.choice for output in result.outputs] == [0, 1, 2, 3]
    assert result.outputs[0].seed == 5
    assert (result.token_ids, result.text) == (result.outputs[0].token_ids, result.outputs[0].text)
    for output in result.outputs:
        alone = generate(client, prompt, k, seed=output.seed, logprobs=1)
        assert alone.token_ids == output.token_ids
        assert (alone.text, alone.finish_reason) == (output.text, output.finish_reason)
        assert len(output.logprobs) == len(output.token_ids)
    assert len({output.token_ids for output in result.outputs}) == 4
    generated = sum(len(output.token_ids) for output in result.outputs)
    assert result.usage.prompt_tokens == 40
    assert result.usage.completion_tokens == generated
    assert result.usage.total_tokens == 40 + generated
    assert len(json.loads(json.dumps(result.to_dict()))["outputs"]) == 4


def test_a_seed_drawn_by_the_server_repeats_all_choices(client: Client) -> None:
    result = client.generate("def ", {"n": 3, "max_tokens": 8}, timeout=HANG)
    assert len({output.seed for output in result.outputs}) == 3
    again = client.generate("def ", {"n": 3, "max_tokens": 8, "seed": result.seed}, timeout=HANG)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]


def test_a_stream_of_several_choices_has_all_reports(oracle: Oracle, client: Client) -> None:
    sampling = {"n": 3, "max_tokens": 16, "seed": 5, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    with client.stream("def main(", sampling, timeout=HANG) as stream:
        chunks = list(stream)
    result = stream.result
    assert chunks[-1].result is result
    assert [chunk.result for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for output in result.outputs:
        mine = [chunk for chunk in chunks if chunk.choice == output.choice]
        assert "".join(chunk.text for chunk in mine) == output.text
        assert sum((chunk.token_ids for chunk in mine), ()) == output.token_ids
        assert sum((chunk.logprobs for chunk in mine), ()) == output.logprobs
        assert [next(iter(position)) for position in output.logprobs] == list(output.token_ids)
        assert output.text.startswith("def main(")
        assert mine[-1].finish_reason == output.finish_reason
    assert result.prompt_logprobs is not None
    told = sum((chunk.prompt_logprobs for chunk in chunks), ())
    assert (None, *told) == result.prompt_logprobs


def test_the_largest_n_is_served(stack: Any) -> None:
    sampling = {"n": limits.MAX_N, "max_tokens": 2, "temperature": 1.0, "seed": 1}
    result = stack.client.generate([5, 6, 7], sampling, timeout=HANG)
    assert len(result.outputs) == limits.MAX_N
    stack.check_pools_whole()
