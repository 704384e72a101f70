"""Tests of sampling, structures, reports and ends once more, by servers that draft trees.

Each cell is a test of another file, with the client of one of the servers: together they pair every kind of
test with every shape.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator
from harness.tiers import mostly_full

from tests.integration import (
    test_reports,
    test_sampling_parameters,
    test_stopping,
    test_structured_outputs,
)

SERVERS = ((2, 6, 1), (3, 12, 1), (4, 32, 1), (2, 16, 2))
"""(width, nodes, drafts) that a coordinator uses where a request does not say."""

Cell = tuple[Callable[..., None], dict[str, Any]]


def cells() -> list[Cell]:
    """At most forty: every parameter, structure and way to end; greedy and sampled in turns."""
    parameters, ends = test_sampling_parameters, test_stopping
    structures, reports = test_structured_outputs, test_reports
    found: list[Cell] = [
        (parameters.test_plain_decoding_equals_transformers_processors, {"name": name, "sampled": sampled})
        for i, name in enumerate(parameters.CASES)
        for sampled in ([True, False] if name == "everything" else [i % 2 == 0])
    ]
    found.append((parameters.test_masks_hold_in_every_mode, {"mode": "rejection"}))
    samplings = list(structures.SAMPLINGS)
    found += [
        (
            structures.test_structured_tokens_are_valid_and_equal_for_every_k,
            {"name": name, "sampling": samplings[i % len(samplings)]},
        )
        for i, name in enumerate(structures.STRUCTURES)
    ]
    found += [
        (structures.test_ratio_modes_give_valid_structures, {"name": name, "mode": "rejection"})
        for name in ("json", "regex")
    ]
    found += [
        (structures.test_min_tokens_yields_to_a_finished_structure, {}),
        (structures.test_structured_log_probabilities_are_the_models_own, {}),
        (reports.test_logprobs_equal_transformers, {"k": 4, "mode": "coupled", "count": 20}),
        (reports.test_logprobs_equal_transformers, {"k": 4, "mode": "rejection", "count": 1}),
        (reports.test_logprobs_are_clipped_with_the_tokens, {}),
        (reports.test_prompt_logprobs_equal_transformers, {"k": 4, "length": 60}),
        (reports.test_n_completions_equal_n_requests, {"k": 4}),
        (ends.test_a_stop_string_across_token_borders_ends_the_text, {"k": 5, "include": True}),
        (ends.test_an_incomplete_stop_string_is_shown_as_text, {"k": 5}),
        (ends.test_stop_token_ids_end_the_sequence, {"k": 5, "at": 7}),
        (ends.test_max_tokens_is_exact, {"k": 5, "count": 6}),
        (ends.test_ignore_eos_and_min_tokens_equal_generate, {"k": 5}),
        (ends.test_min_tokens_masks_stop_tokens_too, {"k": 5}),
        (ends.test_generation_ends_at_the_models_length, {"k": 5}),
    ]
    return found


CELLS = cells()
IN_TURN = [number for start in range(3) for number in range(start, len(CELLS), 3)]
"""Every third cell first: of all kinds, and for all servers."""


@pytest.fixture(scope="module")
def servers(
    stack: RunningStack, pair_paths: Pair, text_drafts: Sequence[str]
) -> Iterator[list[OwnCoordinator]]:
    """Coordinators of the shared pair, and of one more draft where there are several a sequence."""
    target, draft = (stack.stack.address_of(role) for role in ("target", "draft"))
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(
                own_coordinator(
                    pair_paths,
                    [target],
                    [draft, *text_drafts[: drafts - 1]],
                    tree_width=width,
                    max_tree_nodes=nodes,
                    drafts_per_sequence=drafts,
                    sources="none",
                )
            )
            for width, nodes, drafts in SERVERS
        ]


@pytest.mark.parametrize("number", mostly_full(IN_TURN, count=12))
def test_as_with_chains(servers: list[OwnCoordinator], oracle: Oracle, number: int) -> None:
    test, values = CELLS[number]
    client = servers[number % len(SERVERS)].client
    prompt = oracle.encode(SOURCE)[: 80 if test.__module__ == test_stopping.__name__ else 50]
    wanted = inspect.signature(test).parameters
    there: dict[str, Any] = {"client": client, "oracle": oracle, "prompt": prompt}
    if "setting" in wanted:
        start = oracle.encode(SOURCE)[:60]
        free = oracle.greedy(start, test_sampling_parameters.NEW_TOKENS, ignore_eos=True)
        there["setting"] = test_sampling_parameters.Setting(oracle, start, free)
    if "free" in wanted:
        there["free"] = test_stopping.generate(client, prompt, 0)
    test(**{name: value for name, value in (there | values).items() if name in wanted})
