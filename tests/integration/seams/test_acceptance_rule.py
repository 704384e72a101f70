"""An acceptance rule that takes the place of a mode's own, in real processes."""

from __future__ import annotations

import pytest

from tests.integration.seams.test_toys import TOKENS, WithToys, answers, plain

pytestmark = pytest.mark.timeout(300)


def test_rejecting_every_draft_token_is_exact(with_toys: WithToys) -> None:
    with with_toys("reject_everything", num_speculative_tokens=2) as stack:
        told = answers(stack.client)
        assert [tuple(answer.token_ids) for answer in told] == plain(stack.client)
        counts = [answer.speculative_decoding for answer in told]
    assert all(c.num_draft_tokens > 0 for c in counts)
    assert [c.num_rounds for c in counts] == [TOKENS] * len(counts), "a token a round: none is accepted"
    # Drafts were right, so the mode's own rule would have accepted: this counts next tokens that equal them.
    assert all(c.num_accepted_draft_tokens > 0 for c in counts)
