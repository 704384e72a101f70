"""A draft worker with a sub-drafter, through real processes: the tokens are the target's own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator, own_worker, together
from harness.tiers import mostly_full

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
from tests.integration.test_text_drafters import SAMPLINGS, counted, generate

SUB_DRAFTERS = ("prompt-lookup", "ngram")


@pytest.fixture(scope="module", params=mostly_full(SUB_DRAFTERS, count=1))
def sub_drafter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def drafted(stack: RunningStack, pair_paths: Pair, sub_drafter: str) -> Iterator[OwnCoordinator]:
    """A coordinator of the shared target and of a draft worker with a sub-drafter."""
    with (
        own_worker("draft", pair_paths.draft, sub_drafter=sub_drafter) as draft,
        own_coordinator(pair_paths, [stack.stack.address_of("target")], [draft]) as coordinator,
    ):
        yield coordinator


@pytest.mark.parametrize("k", mostly_full([4, 1, 16], count=1))
def test_coupled_tokens_are_those_of_plain_decoding(
    drafted: OwnCoordinator, sub_drafter: str, oracle: Oracle, k: int
) -> None:
    """Alone and among sixteen, with lookahead, after a text and after one that repeats itself."""
    (draft,) = [worker.info for worker in drafted.client.status().workers if worker.role == "draft"]
    assert draft.sub_drafter == sub_drafter
    ids = oracle.encode(SOURCE)
    cases = list(itertools.product([ids[:37], [*ids[:90], *ids[:90], *ids[:20]]], SAMPLINGS))
    plain = [generate(drafted.client, *case, 0).token_ids for case in cases]
    alone = [generate(drafted.client, *case, k) for case in cases]
    crowded = together([lambda c=case: generate(drafted.client, *c, k) for case in cases * 3], 16)
    assert [result.token_ids for result in alone] == plain
    assert [result.token_ids for result in crowded] == plain * 3
    assert counted(alone)[1] > 0


@pytest.mark.full
@pytest.mark.parametrize("mode", ["rejection", "block"])
async def test_sampled_tokens_have_the_models_distribution(
    drafted: OwnCoordinator, sub_drafter: str, oracle: Oracle, mode: str
) -> None:
    prompt = oracle.encode(SOURCE)[:200]
    paths = exact_distributions(oracle, prompt)
    tokens, num_drafted, num_accepted = await sample(drafted.address, prompt, mode)
    assert num_drafted >= SEEDS
    assert 0.1 * num_drafted < num_accepted < 0.98 * num_drafted
    parts = [slice(TOGETHER), *(slice(i, i + 1) for i in range(MAX_TOKENS))]
    values = [chi_square_p(Counter(t[part] for t in tokens), marginal(paths, part)) for part in parts]
    print(f"{sub_drafter}, {mode}: accepted {num_accepted} of {num_drafted}; p-values {values}")
    assert min(values) > LEVEL / len(SUB_DRAFTERS), values
