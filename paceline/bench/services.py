"""The processes under measurement: one target, and two drafts that differ only in lookahead.

    coordinator ────────┐                    ┌── draft, drafts ahead
                        ├── one target ──────┤
    two coordinators ───┘                    └── draft, waits for the verdict

All arms share the target, so nothing else differs, and unused processes are idle. Automatic K has a separate
coordinator, which learns only from its own rounds, with the draft that `paceline serve` would use on this
machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.bench.config import BenchConfig
from paceline.bench.workload import Prompt
from paceline.core.config import CoordinatorConfig
from paceline.supervisor import Sink, StackConfig, serve_stack

_LOOKAHEAD_BRANCHES = 8  # of the draft worker with lookahead; the other has 0
_DEFAULT_ROOM = 256  # lower bound of max_running
_TREES_OF_A_SEQUENCE = 2  # that of the round before is held until the next one's has its place
_BLOCKS_OF_A_BRANCH = 4  # blocks not shared with the ledger
_START_TIMEOUT = 900.0


@dataclass(frozen=True, slots=True)
class Services:
    """Addresses of the coordinators."""

    lookahead: str
    without: str
    choosing: str
    """The coordinator for automatic K only."""


def blocks_needed(config: BenchConfig, prompts: Sequence[Prompt]) -> int:
    """Cache blocks for all concurrent requests, branches and trees, so that the pool never limits a
    measurement."""
    longest = max(len(prompt) for prompt in prompts) + config.longest_answer + 2 * max(config.k)
    each = -(-longest // config.block_size) + 1
    if config.max_tree_nodes:
        # A tree may begin at any place in its first block.
        each += _TREES_OF_A_SEQUENCE * (-(-max(config.max_tree_nodes) // config.block_size) + 1)
    return each * max(config.concurrency) + _BLOCKS_OF_A_BRANCH * _LOOKAHEAD_BRANCHES


@contextlib.contextmanager
def serve(config: BenchConfig, prompts: Sequence[Prompt], sink: Sink) -> Iterator[Services]:
    """Context manager that runs all six processes. Raises as `serve_stack`."""
    room = max(*config.concurrency, _DEFAULT_ROOM)
    stack_config = StackConfig(
        target_model=config.target_model,
        draft_model=config.draft_model,
        target_device=config.device,
        draft_device=config.device_of_draft,
        target_dtype=config.dtype,
        draft_dtype=config.dtype,
        target_threads=config.threads,
        draft_threads=config.threads,
        num_blocks=blocks_needed(config, prompts),
        block_size=config.block_size,
        # All arms use the same prompts, and each must compute them, as the peers do.
        prefix_cache=False,
        start_timeout=_START_TIMEOUT,
        target={"max_sequences": room},
        draft={"max_sequences": room, "lookahead_branches": _LOOKAHEAD_BRANCHES},
        coordinator={"max_running": room},
    )
    with serve_stack(stack_config, sink=sink) as stack:
        waits = replace(stack.config.draft_config, lookahead_branches=0)
        waiting = stack.add("draft without lookahead", "draft-worker", waits).address

        def coordinator(role: str, draft: str) -> tuple[str, str, CoordinatorConfig]:
            config = stack.config.coordinator_config((stack.address_of("target"),), (draft,))
            return role, "coordinator", config

        without, choosing = stack.start(
            coordinator("coordinator without lookahead", waiting),
            coordinator(
                "coordinator that chooses K", stack.address_of("draft") if config.drafts_ahead else waiting
            ),
        )
        yield Services(lookahead=stack.address, without=without.address, choosing=choosing.address)
