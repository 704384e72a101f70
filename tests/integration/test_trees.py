"""Draft trees and several drafts through real processes: the tokens are the target's own."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator, own_worker, together
from harness.tiers import mostly_full
from harness.waiting import HANG

from paceline.client import AsyncClient, Client, GenerationResult
from tests.integration.test_sampling_distribution import (
    LEVEL,
    MAX_TOKENS,
    TOGETHER,
    chi_square_p,
    exact_distributions,
    marginal,
    sample,
)
from tests.integration.test_text_drafters import SAMPLINGS, counted

WIDTHS = (1, 2, 3, 4)
NODES = (1, 2, 4, 8, 16, 32)
DRAFTS = (1, 3)
TREE_SEEDS = 1200
"""Trees cost several times what chains cost; the simulator has more of their distributions."""
FAST = ((3, 16, 1), (4, 32, 3), (2, 8, 3))
"""Cells of every tier: (width, nodes, drafts)."""
SHAPES = (*FAST, *(cell for cell in itertools.product(WIDTHS, NODES, DRAFTS) if cell not in FAST))


@pytest.fixture(scope="module")
def fleet(stack: RunningStack, pair_paths: Pair, text_drafts: Sequence[str]) -> Iterator[OwnCoordinator]:
    """A coordinator of the shared pair and of two more drafts."""
    target, draft = (stack.stack.address_of(role) for role in ("target", "draft"))
    with own_coordinator(pair_paths, [target], [draft, *text_drafts]) as coordinator:
        yield coordinator


def generate(
    client: Client, prompt: Ids, sampling: dict[str, Any], k: int, **speculation: Any
) -> GenerationResult:
    wanted = {"max_tokens": 32, "ignore_eos": True} | sampling
    told = {"num_speculative_tokens": k, "drafter": "draft"} | speculation
    return client.generate(prompt, wanted, speculation=told, timeout=HANG)


def shape_of(width: int, nodes: int, drafts: int) -> dict[str, int]:
    """What a request says; what bounds nothing is left out, since it would be refused."""
    shape = {"tree_width": width, "drafts_per_sequence": drafts}
    return shape | ({"max_tree_nodes": nodes} if width > 1 or drafts > 1 else {})


@pytest.mark.parametrize(("width", "nodes", "drafts"), mostly_full(SHAPES, count=len(FAST)))
def test_tokens_are_those_of_plain_decoding(
    client: Client, fleet: OwnCoordinator, oracle: Oracle, width: int, nodes: int, drafts: int
) -> None:
    """At temperature 0 and in coupled mode, alone and among sixteen, with drafting ahead."""
    served = client if drafts == 1 else fleet.client
    ids = oracle.encode(SOURCE)
    cases = list(itertools.product([ids[:37], ids[100:300]], SAMPLINGS))
    shape = shape_of(width, nodes, drafts)
    plain = [generate(served, prompt, sampling, 0, drafter=None).token_ids for prompt, sampling in cases]
    alone = [generate(served, *case, 5, **shape) for case in cases]
    crowded = together([lambda c=case: generate(served, *c, 5, **shape) for case in cases * 3], 16)
    assert [result.token_ids for result in alone] == plain
    assert [result.token_ids for result in crowded] == plain * 3
    assert counted(alone)[1] > 0
    if width > 1 and nodes > 5:
        ranks = [result.speculative_decoding.accepted_per_rank[1:] for result in alone]
        assert sum(map(sum, ranks)) > 0, "no second child was accepted"


def test_a_tree_brings_more_tokens_a_round_than_its_chain(client: Client, oracle: Oracle) -> None:
    ids = oracle.encode(SOURCE)
    prompts = [ids[i : i + 60] for i in range(0, 360, 60)]

    def tokens_a_round(sampling: dict[str, Any], **shape: Any) -> float:
        told = [generate(client, p, sampling, 5, **shape).speculative_decoding for p in prompts]
        accepted = sum(t.num_accepted_draft_tokens for t in told)
        return 1 + accepted / sum(t.num_rounds for t in told)

    for sampling in SAMPLINGS[:2]:
        chain = tokens_a_round(sampling)
        tree = tokens_a_round(sampling, tree_width=4, max_tree_nodes=32)
        assert tree > chain


def test_a_draft_that_dies_costs_its_branch_only(
    stack: RunningStack, pair_paths: Pair, oracle: Oracle
) -> None:
    """Two of three drafts die while sixteen requests run; all get the tokens of plain decoding."""
    target, draft = (stack.stack.address_of(role) for role in ("target", "draft"))
    ids = oracle.encode(SOURCE)
    prompts = [ids[7 * i : 7 * i + 40] for i in range(16)]
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 64}
    with contextlib.ExitStack() as doomed:
        others = ("ngram", "stacked:ngram+bigram")
        addresses = [
            doomed.enter_context(own_worker("draft", pair_paths.target, drafter=name)) for name in others
        ]
        with own_coordinator(pair_paths, [target], [draft, *addresses]) as own:
            plain = [generate(own.client, p, sampling, 0, drafter=None).token_ids for p in prompts]
            begun = own.client.stream(
                prompts[0],
                {"ignore_eos": True, **sampling},
                speculation={"num_speculative_tokens": 4, "tree_width": 2, "drafts_per_sequence": 3},
                timeout=HANG,
            )
            next(iter(begun))
            calls = [
                lambda p=p: generate(own.client, p, sampling, 4, tree_width=2, drafts_per_sequence=3)
                for p in prompts
            ]
            calls.append(lambda: doomed.pop_all().close())  # type: ignore[arg-type, return-value]
            results = together(calls, at_once=len(calls))[:-1]
            assert [result.token_ids for result in results] == plain
            for _ in begun:
                pass
            assert begun.result.token_ids == plain[0]
            again = generate(own.client, prompts[1], sampling, 4, tree_width=2, drafts_per_sequence=3)
            assert again.token_ids == plain[1], "one draft is left"


@pytest.mark.parametrize(
    ("width", "nodes", "drafts"), mostly_full([(2, 8, 2), (3, 9, 1), (4, 32, 1), (1, 6, 3)], count=1)
)
async def test_sampled_tokens_have_the_models_distribution(
    stack: RunningStack, fleet: OwnCoordinator, oracle: Oracle, width: int, nodes: int, drafts: int
) -> None:
    """In rejection mode."""
    prompt = oracle.encode("import ")
    paths = exact_distributions(oracle, prompt)
    address = stack.address if drafts == 1 else fleet.address
    shape = shape_of(width, nodes, drafts)
    tokens, drafted, accepted = await sample(
        address, prompt, "rejection", TREE_SEEDS, drafter="draft", **shape
    )
    # A chain of K proposes less.
    assert drafted >= TREE_SEEDS * nodes
    assert 0.02 * drafted < accepted < 0.98 * drafted
    parts = [slice(TOGETHER), *(slice(i, i + 1) for i in range(MAX_TOKENS))]
    values = [chi_square_p(Counter(t[part] for t in tokens), marginal(paths, part)) for part in parts]
    print(f"{shape}: accepted {accepted} of {drafted}; p-values {values}")
    assert min(values) > LEVEL, values


async def test_a_seed_repeats_its_tokens_in_rejection_mode(stack: RunningStack, oracle: Oracle) -> None:
    prompt = oracle.encode(SOURCE)[:50]
    wanted = {"max_tokens": 24, "temperature": 0.9, "seed": 9, "ignore_eos": True}
    shape = {"tree_width": 3, "max_tree_nodes": 12, "drafter": "draft"}
    told = {"num_speculative_tokens": 4, "acceptance": "rejection", **shape}
    async with AsyncClient(stack.address) as client:
        first, second = [
            await client.generate(prompt, wanted, speculation=told, timeout=HANG) for _ in range(2)
        ]
    assert first.token_ids == second.token_ids
    assert first.speculative_decoding.num_accepted_draft_tokens > 0
