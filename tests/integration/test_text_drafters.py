"""Draft workers without a model, through real processes: the tokens are the target's own."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator, own_worker, together
from harness.tiers import mostly_full
from harness.waiting import HANG

from paceline.client import Client, GenerationResult
from tests.integration.test_sampling_distribution import (
    LEVEL,
    MAX_TOKENS,
    SEEDS,
    TOGETHER,
    chi_square_p,
    exact_distributions,
    marginal,
    sample,
)

DRAFTERS = ("stacked:ngram+bigram", "random", "ngram", "bigram", "unigram")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 21},
    {"temperature": 0.8, "seed": 22, "top_p": 0.9, "repetition_penalty": 1.1},
)
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=mostly_full(DRAFTERS, count=1))
def drafter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def drafted(
    stack: RunningStack, pair_paths: Pair, drafter: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnCoordinator]:
    """A coordinator of the shared target and of a draft worker without a model."""
    corpus: Path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    corpus.write_text(SOURCE)
    how = {"corpus": str(corpus)} if drafter in ("bigram", "stacked:ngram+bigram") else {}
    with (
        own_worker("draft", pair_paths.target, drafter=drafter, **how) as draft,
        own_coordinator(pair_paths, [stack.stack.address_of("target")], [draft]) as coordinator,
    ):
        yield coordinator


def generate(client: Client, prompt: Ids, sampling: dict[str, Any], k: int) -> GenerationResult:
    wanted = {"max_tokens": 32, "ignore_eos": True} | sampling
    speculation = {"num_speculative_tokens": k, "drafter": "draft"}
    return client.generate(prompt, wanted, speculation=speculation, timeout=HANG)


def test_status_names_the_drafter(drafted: OwnCoordinator, drafter: str) -> None:
    told = {worker.role: worker.info for worker in drafted.client.status().workers}
    assert told["draft"] is not None
    assert told["target"] is not None
    assert (told["draft"].drafter, told["target"].drafter) == (drafter, "")


def counted(results: list[GenerationResult]) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    told = [result.speculative_decoding for result in results]
    return sum(t.num_draft_tokens for t in told), sum(t.num_accepted_draft_tokens for t in told)


@pytest.mark.parametrize("k", mostly_full([4, 1, 16], count=1))
def test_coupled_tokens_are_those_of_plain_decoding(
    drafted: OwnCoordinator, drafter: str, oracle: Oracle, k: int
) -> None:
    """Alone and among sixteen, with lookahead."""
    ids = oracle.encode(SOURCE)
    cases = list(itertools.product([ids[:37], ids[100:300]], SAMPLINGS))
    plain = [generate(drafted.client, *case, 0).token_ids for case in cases]
    alone = [generate(drafted.client, *case, k) for case in cases]
    crowded = together([lambda c=case: generate(drafted.client, *c, k) for case in cases * 3], 16)
    assert [result.token_ids for result in alone] == plain
    assert [result.token_ids for result in crowded] == plain * 3
    num_drafted, num_accepted = counted(alone)
    assert num_drafted > 0
    assert num_accepted > 0 or drafter == "random"


def test_structures_and_choices_are_those_of_plain_decoding(drafted: OwnCoordinator, oracle: Oracle) -> None:
    prompt = oracle.encode(SOURCE)[:60]
    structure = {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0, "seed": 3, "ignore_eos": False}
    choices = {"n": 2, "temperature": 0.9, "seed": 4}
    for sampling in (structure, choices):
        plain = generate(drafted.client, prompt, sampling, 0)
        result = generate(drafted.client, prompt, sampling, 4)
        assert [one.token_ids for one in result.outputs] == [one.token_ids for one in plain.outputs]
        if sampling is structure:
            assert json.loads(result.text)["unit"] in ("celsius", "fahrenheit")


@pytest.mark.full
async def test_sampled_tokens_have_the_models_distribution(
    drafted: OwnCoordinator, drafter: str, oracle: Oracle
) -> None:
    """In one ratio mode each: how a mode judges does not depend on where q comes from."""
    mode = ("rejection", "block")[DRAFTERS.index(drafter) % 2]
    prompt = oracle.encode(SOURCE)[:200]
    paths = exact_distributions(oracle, prompt)
    tokens, num_drafted, num_accepted = await sample(drafted.address, prompt, mode)
    assert num_drafted >= SEEDS
    assert num_accepted < 0.98 * num_drafted
    assert drafter == "random" or num_accepted > 0.005 * num_drafted
    parts = [slice(TOGETHER), *(slice(i, i + 1) for i in range(MAX_TOKENS))]
    values = [chi_square_p(Counter(t[part] for t in tokens), marginal(paths, part)) for part in parts]
    print(f"{drafter}, {mode}: accepted {num_accepted} of {num_drafted}; p-values {values}")
    assert min(values) > LEVEL / len(DRAFTERS), values
