"""Settings that reduce drafting: logged once, and part of every status."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.validation import DraftTokens
from paceline.v1 import common_pb2


def setup_warnings(
    num_speculative_tokens: DraftTokens,
    target: common_pb2.WorkerInfo,
    drafts: Sequence[common_pb2.WorkerInfo],
) -> list[str]:
    """One sentence for each such setting.

    Args:
        num_speculative_tokens: the default K.
        target: the target's limits.
        drafts: the admitted drafts.
    """
    shorter = [
        f"the draft {draft.model} takes up to {draft.max_model_len} tokens, the target"
        f" {target.max_model_len}: it proposes nothing after that"
        for draft in drafts
        if draft.max_model_len < target.max_model_len
    ]
    idle = [
        f"num_speculative_tokens is 0: the draft {draft.model} is loaded, but used only by requests that"
        " set a number of their own"
        for draft in drafts
        if num_speculative_tokens == 0
    ]
    waiting = [
        f"the draft {draft.model} on {draft.device} does not draft ahead (its lookahead_branches is 0)"
        for draft in drafts
        if draft.device.startswith("cuda") and not draft.lookahead_branches
    ]
    return list(dict.fromkeys([*shorter, *idle, *waiting]))
