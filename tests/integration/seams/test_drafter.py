"""A drafter without a model or a cache, one file and one registry line, serves exactly in real processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
from harness.waiting import HANG

if TYPE_CHECKING:
    from harness.stacks import RunningStack

    from paceline.client import Client

pytestmark = pytest.mark.timeout(300)
WithToys = Callable[..., "AbstractContextManager[RunningStack]"]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45]]
TOKENS = 24


def answers(client: Client, temperature: float, **speculation: Any) -> list[Any]:
    """To each prompt, by seed."""
    sampling = {"max_tokens": TOKENS, "temperature": temperature, "seed": 11, "ignore_eos": True}
    return [
        client.generate(prompt, sampling, speculation=speculation or None, timeout=HANG) for prompt in PROMPTS
    ]


def test_uniform_drafter_is_exact(with_toys: WithToys) -> None:
    with with_toys(
        "uniform_drafter", drafter="uniform", num_speculative_tokens=3, prompt_lookup=False
    ) as stack:
        for temperature in (0.0, 1.0):
            plain = answers(stack.client, temperature, num_speculative_tokens=0)
            drafted = answers(stack.client, temperature)
            assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
            assert all(answer.speculative_decoding.num_draft_tokens > 0 for answer in drafted)
        ratio = answers(stack.client, 1.0, acceptance="rejection")
        assert all(answer.speculative_decoding.num_draft_tokens > 0 for answer in ratio)
        assert all(len(answer.token_ids) == TOKENS for answer in ratio)
        draft = stack.worker("draft").info
        assert draft is not None
        assert (draft.num_parameters, draft.cache.total_blocks, draft.cache.sequences) == (0, 0, 0)
