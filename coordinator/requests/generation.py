"""An accepted request, as gRPC and HTTP read it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.requests.registry import Reader
from coordinator.round.machine import RoundMachine
from coordinator.scheduling.running_sequence import Parts, Running
from coordinator.sequence.ledger import Commit
from paceline.core.types import SequenceParams
from paceline.rpc.codec import GenerateCall


@dataclass(frozen=True, slots=True)
class Generation:
    """An accepted request: one running sequence for each of its choices."""

    request_id: str
    prompt: Sequence[int]
    choices: Sequence[Running]
    reader: Reader | None = None
    before: Sequence[Iterable[Commit]] = ()
    """Commits to send first, for each choice: the echo of the prompt, and commits that the client missed."""
    queues: Sequence[Parts] = ()
    """The queue of later commits of each choice, until another client takes the request over."""

    @property
    def machines(self) -> list[RoundMachine]:
        """The round machine of each choice: parameters, ledger, counts and times."""
        return [running.machine for running in self.choices]

    @property
    def params(self) -> SequenceParams:
        """Parameters of the first choice. Those of the other choices differ in their seeds."""
        return self.choices[0].state.params


def workers_salt(call: GenerateCall, tenant: str, key: bytes) -> str:
    """The salt of a request's cached prefixes on the workers. Prefixes are shared only between equal salts.

    Tenants never share, whatever salt they ask for, and a tenant's salt cannot be computed without the key.
    The length before the name keeps "a" with "b:" from being "a:b". Without tenants the client's salt is
    used.
    """
    if not tenant:
        return call.cache_salt
    named = f"{len(tenant)}:{tenant}:{call.cache_salt}"
    return hmac.new(key, named.encode(), hashlib.sha256).hexdigest()
