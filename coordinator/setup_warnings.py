"""Settings that reduce drafting: logged once, and part of every status."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.core.config import CoordinatorConfig
from paceline.core.types import AcceptanceMode
from paceline.core.validation import AUTO
from paceline.v1 import common_pb2


def setup_warnings(
    config: CoordinatorConfig,
    target: common_pb2.WorkerInfo,
    drafts: Sequence[common_pb2.WorkerInfo],
    num_awaited: int = 0,
) -> list[str]:
    """One sentence for each such setting.

    Args:
        config: the defaults of requests.
        target: the target's limits.
        drafts: the admitted drafts.
        num_awaited: number of other drafts, which are starting or lost.
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
        if config.num_speculative_tokens == 0
    ]
    waiting = [
        f"the draft {draft.model} on {draft.device} does not draft ahead (its lookahead_branches is 0)"
        for draft in drafts
        if draft.device.startswith("cuda") and not draft.lookahead_branches
    ]
    chains = [
        f"the {role} {worker.model} takes no trees: its rounds have chains"
        for role, workers in (("target", (target,)), ("draft", drafts))
        for worker in workers
        if config.tree_width != 1 and not worker.max_tree_nodes
    ]
    undecided = [
        "tree_width is auto, but num_speculative_tokens is not: there are only chains"
        for _ in drafts
        if config.tree_width == AUTO and (config.speculation_table or config.num_speculative_tokens != AUTO)
    ]
    few = _too_few(config, drafts, num_awaited)
    return list(dict.fromkeys([*shorter, *idle, *waiting, *chains, *undecided, *few]))


def _too_few(
    config: CoordinatorConfig, drafts: Sequence[common_pb2.WorkerInfo], num_awaited: int
) -> Iterator[str]:
    wanted, known = config.drafts_per_sequence, len(drafts) + num_awaited
    if drafts and known < wanted:
        yield f"drafts_per_sequence is {wanted}, but there are fewer draft workers ({known})"
    # A draft without weights has no fingerprint and counts as a model of its own.
    models = {draft.model_fingerprint or draft.instance_id for draft in drafts}
    if config.acceptance is AcceptanceMode.COUPLED and len(models) < wanted <= len(drafts):
        yield (
            f"drafts_per_sequence is {wanted}, but the drafts are of fewer models ({len(models)}): in coupled"
            " mode, drafts of one model would propose the same, so one of them is asked"
        )
