"""Coupled mode: a seed's tokens do not depend on the draft, K or other requests (architecture, 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE, id_prompts
from harness.stacks import together
from harness.waiting import HANG

from paceline.client import Client

NEW_TOKENS = 40
KS = (0, 2, 5)
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_p": 0.01,
    },
}


def request(
    client: Client, prompt: Ids, k: int, sampling: Mapping[str, Any], seed: int, mode: str = "coupled"
) -> Ids:
    """Tokens of one request."""
    parameters = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": seed, **sampling}
    speculation = {"num_speculative_tokens": k, "acceptance": mode}
    return client.generate(prompt, parameters, speculation=speculation, timeout=HANG).token_ids


def check_invariance(client: Client, prompts: Sequence[Ids], sampling: Mapping[str, Any]) -> None:
    """The same tokens for every K, alone and among sixteen others of other kinds."""
    prompt, others = prompts[0], prompts[1:]
    alone = {k: request(client, prompt, k, sampling, seed=11) for k in KS}
    assert len(set(alone.values())) == 1, alone
    assert len(alone[0]) == NEW_TOKENS
    calls = [lambda k=k: request(client, prompt, k, sampling, seed=11) for k in KS]
    calls += [
        lambda i=i: request(
            client,
            others[i % len(others)],
            k=(0, 1, 4, 7)[i % 4],
            sampling=({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95})[i % 2],
            seed=100 + i,
            mode=("coupled", "rejection", "block")[i % 3],
        )
        for i in range(16)
    ]
    crowded = together(calls, at_once=len(calls))
    assert crowded[: len(KS)] == [alone[0]] * len(KS)
    assert request(client, prompt, 5, sampling, seed=12) != alone[0], "the seed has no effect"


@pytest.mark.parametrize("name", SAMPLINGS)
def test_same_seed_same_tokens_for_every_k_and_load(oracle: Oracle, client: Client, name: str) -> None:
    prompts = [oracle.encode(SOURCE)[:37], *id_prompts(oracle)]
    check_invariance(client, prompts, SAMPLINGS[name])
