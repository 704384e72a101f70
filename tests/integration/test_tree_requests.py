"""Draft trees asked for through real processes: tokens of plain decoding, counts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from harness.refusals import refused
from harness.stacks import RunningStack
from harness.waiting import HANG
from harness.web import Http

from paceline.client import Client, GenerationResult

PROMPT = "def get_width(self):\n    return self."
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 41},
    {"temperature": 0.8, "seed": 42, "top_p": 0.9, "frequency_penalty": 0.2, "logprobs": 1},
)
TREES: dict[str, Any] = {"tree_width": 3, "max_tree_nodes": 12, "num_speculative_tokens": 4}
TOKENS = 48


def generate(client: Client, sampling: dict[str, Any], **speculation: Any) -> GenerationResult:
    wanted = {"max_tokens": TOKENS, "ignore_eos": True} | sampling
    return client.generate(PROMPT, wanted, speculation={"drafter": "draft"} | speculation, timeout=HANG)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_trees_give_the_tokens_of_plain_decoding(client: Client, sampling: dict[str, Any]) -> None:
    plain = generate(client, sampling, num_speculative_tokens=0)
    chain = generate(client, sampling, num_speculative_tokens=4)
    tree = generate(client, sampling, **TREES)
    assert tree.token_ids == chain.token_ids == plain.token_ids
    assert tree.logprobs == plain.logprobs
    told = tree.speculative_decoding
    assert 4 * told.num_spec_steps < told.num_draft_tokens <= 12 * told.num_spec_steps
    assert len(told.acceptance_rate_per_position) <= 4
    assert sum(told.accepted_per_rank) == told.num_accepted_draft_tokens
    assert len(chain.speculative_decoding.accepted_per_rank) <= 1


def test_a_second_child_is_accepted_where_the_first_is_not(client: Client) -> None:
    """Else trees were nothing but chains with more rows."""
    told = [generate(client, {"temperature": 1.0, "seed": seed}, **TREES) for seed in range(50, 54)]
    assert sum(sum(each.speculative_decoding.accepted_per_rank[1:]) for each in told) > 0


def test_the_server_may_choose(client: Client) -> None:
    plain = generate(client, SAMPLINGS[1], num_speculative_tokens=0)
    asked: tuple[dict[str, Any], ...] = ({"tree_width": "auto"}, {"tree_width": 2, "max_tree_nodes": 8})
    for speculation in asked:
        assert generate(client, SAMPLINGS[1], **speculation).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("sampling", "speculation", "field"),
    [
        ({}, {"tree_width": 0}, "tree_width"),
        ({}, {"tree_width": 17}, "tree_width"),
        ({}, {"max_tree_nodes": 65, "tree_width": 2}, "max_tree_nodes"),
        ({}, {"drafts_per_sequence": 5}, "drafts_per_sequence"),
        ({}, {"max_tree_nodes": 8}, "max_tree_nodes"),
        ({}, {"tree_width": 2, "num_speculative_tokens": 0}, "tree_width"),
        ({}, {"drafts_per_sequence": 2, "num_speculative_tokens": 0}, "drafts_per_sequence"),
        ({}, {"tree_width": 2, "drafter": "ngram"}, "tree_width"),
        ({"temperature": 1.0}, {"tree_width": 2, "acceptance": "block"}, "tree_width"),
        ({"temperature": 1.0}, {"drafts_per_sequence": 2, "acceptance": "block"}, "drafts_per_sequence"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    client: Client, http: Http, sampling: dict[str, Any], speculation: dict[str, Any], field: str
) -> None:
    with refused(field):
        generate(client, sampling, **speculation)
    answer = http.post("/v1/completions", {"prompt": "x", **sampling, "speculative_decoding": speculation})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"speculative_decoding.{field}"


def test_status_tells_which_workers_take_trees(stack: RunningStack) -> None:
    status = stack.client.status()
    assert (status.coordinator.tree_width, status.coordinator.max_tree_nodes) == (1, 16)
    assert status.coordinator.drafts_per_sequence == 1
    for worker in status.workers:
        assert worker.info is not None
        assert worker.info.max_tree_nodes > 0
