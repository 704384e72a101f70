"""Toy implementations, each one file and one registry line, serve exactly in real processes."""

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


def answers(client: Client, **speculation: Any) -> list[Any]:
    """Greedy and sampled, by seed."""
    return [
        client.generate(
            prompt,
            {"max_tokens": TOKENS, "temperature": temperature, "seed": 11, "ignore_eos": True},
            speculation=speculation or None,
            timeout=HANG,
        )
        for prompt in PROMPTS
        for temperature in (0.0, 1.0)
    ]


def plain(client: Client) -> list[tuple[int, ...]]:
    """What the target alone says."""
    return [tuple(answer.token_ids) for answer in answers(client, num_speculative_tokens=0)]


def test_constant_source_is_exact(with_toys: WithToys) -> None:
    with with_toys(
        "constant_source", num_speculative_tokens=2, draft_model=None, sources="constant"
    ) as stack:
        told = answers(stack.client)
        assert [tuple(answer.token_ids) for answer in told] == plain(stack.client)
        assert all(answer.speculative_decoding.num_draft_tokens > 0 for answer in told)
