"""A toy backend serves exactly in the processes of both models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.seams.test_toys import WithToys, answers, plain

pytestmark = pytest.mark.timeout(300)


def test_counting_backend_is_exact(
    with_toys: WithToys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOY_PASSES", str(tmp_path))

    def counts() -> dict[str, int]:
        return {path.name: int(path.read_text() or 0) for path in tmp_path.iterdir()}

    with with_toys("counting_backend", num_speculative_tokens=2) as stack:
        before = counts()
        told: list[Any] = answers(stack.client)
        after = counts()
        assert len(after) == 2, "the draft's process and the target's"
        assert all(after[process] > before[process] > 0 for process in after)
        assert [tuple(answer.token_ids) for answer in told] == plain(stack.client)
        assert all(answer.speculative_decoding.num_draft_tokens > 0 for answer in told)
