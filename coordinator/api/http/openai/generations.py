"""The generations of one HTTP request: started, read and ended together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from coordinator.app import Coordinator
from coordinator.auth import Group
from coordinator.requests.generation import Generation
from coordinator.requests.merge import together
from coordinator.sequence.ledger import Commit
from paceline.rpc.codec import GenerateCall


@contextlib.asynccontextmanager
async def generating(
    coordinator: Coordinator, calls: Sequence[GenerateCall]
) -> AsyncIterator[list[Generation]]:
    """Start all generations or none: sequences are counted before the first begins. Raises PacelineError."""
    async with contextlib.AsyncExitStack() as exits:
        sequences = sum(call.sampling.n for call in calls)
        coordinator.dispatcher.check_fits(sequences)
        group = Group(coordinator.gate, sequences)
        exits.callback(group.close)
        yield [await exits.enter_async_context(coordinator.generating(call, group=group)) for call in calls]


async def merged_parts(
    coordinator: Coordinator, generations: Sequence[Generation]
) -> AsyncGenerator[tuple[int, Commit], None]:
    """Yield (choice, commit) as they arrive, with choices numbered across all generations.

    Commits of one choice stay in order. Raises the first PacelineError.
    """
    streams, first = [], 0
    for generation in generations:
        streams.append(_numbered(coordinator.parts(generation), first))
        first += len(generation.choices)
    async for part in streams[0] if len(streams) == 1 else together(streams):
        yield part


async def _numbered(commits: AsyncIterator[Commit], first: int) -> AsyncIterator[tuple[int, Commit]]:
    async for commit in commits:
        yield first + commit.choice, commit
