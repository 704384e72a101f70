"""Draft tokens copied from the text: bounded, counted, and without effect on tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack, own_coordinator
from harness.waiting import HANG

from paceline.client import Client, GenerationResult, InvalidArgumentError, SpeculationParams

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def alone(stack: RunningStack) -> Iterator[Client]:
    """No draft to ask: what can be copied is. Otherwise it is a question of how fast the draft is."""
    with own_coordinator(stack.pair, [stack.stack.address_of("target")]) as own:
        yield own.client


def repeating(oracle: Oracle) -> Ids:
    """A prompt whose end has been there before, and goes on there."""
    return oracle.encode(SOURCE)[:60] * 2


def generated(client: Client, prompt: Ids, temperature: float, **speculation: Any) -> GenerationResult:
    sampling = {"temperature": temperature, "seed": 5, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    return client.generate(prompt, sampling, speculation=speculation, timeout=HANG)


@pytest.mark.parametrize("k", [1, 4, "auto"])
def test_prompt_lookup_keeps_greedy_text(oracle: Oracle, client: Client, k: int | str) -> None:
    prompt = repeating(oracle)
    copied = generated(client, prompt, 0.0, num_speculative_tokens=k, prompt_lookup=True)
    drafted = generated(client, prompt, 0.0, num_speculative_tokens=k, prompt_lookup=False)
    assert copied.token_ids == drafted.token_ids == oracle.greedy(prompt, NEW_TOKENS, ignore_eos=True)
    counts = copied.speculative_decoding
    assert counts.num_prompt_lookups <= counts.num_spec_steps
    assert drafted.speculative_decoding.num_prompt_lookups == 0


@pytest.mark.parametrize("mode", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("k", [1, 4])
def test_prompt_lookup_copies_are_judged_and_counted(
    oracle: Oracle, alone: Client, k: int, mode: str
) -> None:
    """The distribution is tested in the simulation's test_losslessness.py; here tokens are greedy."""
    prompt = repeating(oracle)
    wanted = {"num_speculative_tokens": k, "acceptance": mode, "prompt_lookup": True}
    result = generated(alone, prompt, 0.0, **wanted)
    assert result.token_ids == oracle.greedy(prompt, NEW_TOKENS, ignore_eos=True)
    counts = result.speculative_decoding
    assert 0 < counts.num_prompt_lookups == counts.num_spec_steps
    assert len(generated(alone, prompt, 1.0, **wanted).token_ids) == NEW_TOKENS


def test_coupled_tokens_do_not_depend_on_prompt_lookup(oracle: Oracle, client: Client) -> None:
    prompt = repeating(oracle)
    results = [
        generated(client, prompt, 1.0, num_speculative_tokens=k, prompt_lookup=lookup)
        for k, lookup in ((0, True), (3, False), (3, True), (8, True))
    ]
    assert len({result.token_ids for result in results}) == 1
    assert results[0].speculative_decoding.num_prompt_lookups == 0, "K = 0 is plain decoding"


def test_a_non_boolean_prompt_lookup_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt_lookup"):
        client.generate("a", {"max_tokens": 1}, speculation={"prompt_lookup": "yes"}, timeout=HANG)
    with pytest.raises(InvalidArgumentError, match="prompt_lookup"):
        SpeculationParams(prompt_lookup=1)  # type: ignore[arg-type]
