"""Toy implementations, each one file and one registry line, serve exactly in real processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from harness.stacks import RunningStack
from harness.waiting import HANG

from paceline.client import Client

pytestmark = pytest.mark.timeout(300)
WithToys = Callable[..., AbstractContextManager[RunningStack]]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45]]
TOKENS = 24


def answers(client: Client, **speculation: Any) -> list[Any]:
    """Greedy and sampled, by seed."""
    common = {"max_tokens": TOKENS, "seed": 11, "ignore_eos": True}
    return [
        client.generate(prompt, {**common, "temperature": t}, speculation=speculation or None, timeout=HANG)
        for prompt in PROMPTS
        for t in (0.0, 1.0)
    ]


def drafted(client: Client) -> list[Any]:
    """Answers that had drafts, with the tokens that the target alone gives."""
    told, plain = answers(client), answers(client, num_speculative_tokens=0)
    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in plain]
    assert all(answer.speculative_decoding.num_draft_tokens > 0 for answer in told)
    return told


def test_constant_source_is_exact(with_toys: WithToys) -> None:
    with with_toys(
        "constant_source", num_speculative_tokens=2, draft_model=None, sources="constant"
    ) as stack:
        drafted(stack.client)


def test_uniform_drafter_is_exact(with_toys: WithToys) -> None:
    """A drafter without a model or a cache."""
    options = {"drafter": "uniform", "num_speculative_tokens": 3, "prompt_lookup": False}
    with with_toys("uniform_drafter", **options) as stack:
        drafted(stack.client)
        ratio = answers(stack.client, acceptance="rejection")
        assert all(answer.speculative_decoding.num_draft_tokens > 0 for answer in ratio)
        assert all(len(answer.token_ids) == TOKENS for answer in ratio)
        draft = stack.worker("draft").info
        assert (draft.num_parameters, draft.cache.total_blocks, draft.cache.sequences) == (0, 0, 0)


def test_rule_and_backend_of_ones_own_are_exact(
    with_toys: WithToys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acceptance rule in the place of a mode's own, over a backend that counts, in both processes."""
    monkeypatch.setenv("PACELINE_TOY_PASSES", str(tmp_path))

    def counts() -> dict[str, int]:
        return {path.name: int(path.read_text() or 0) for path in tmp_path.iterdir()}

    with with_toys("counting_backend", "reject_everything", num_speculative_tokens=2) as stack:
        before = counts()
        told = [answer.speculative_decoding for answer in drafted(stack.client)]
        after = counts()
    assert len(after) == 2, "the draft's process and the target's"
    assert all(after[process] > before[process] > 0 for process in after)
    assert [c.num_rounds for c in told] == [TOKENS] * len(told), "a token a round: none is accepted"
    # Drafts were right, so the mode's own rule would have accepted: this counts next tokens that equal them.
    assert all(c.num_accepted_draft_tokens > 0 for c in told)
