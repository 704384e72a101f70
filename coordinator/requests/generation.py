"""One request that was accepted, as the faces read it."""

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
    """One request that was accepted, and how it will be run: a sequence for each of its choices."""

    request_id: str
    prompt: Sequence[int]
    choices: Sequence[Running]
    reader: Reader | None = None
    before: Sequence[Iterable[Commit]] = ()
    """What comes before all else, of each choice: the echo, and what the client has missed."""
    queues: Sequence[Parts] = ()
    """Where the rest comes, one each choice, until another client takes the request over."""

    @property
    def machines(self) -> list[RoundMachine]:
        """Each choice's round machine: parameters, ledger, counts and times."""
        return [running.machine for running in self.choices]

    @property
    def params(self) -> SequenceParams:
        """Those of the first choice; the others differ in their seeds."""
        return self.choices[0].state.params


def workers_salt(call: GenerateCall, tenant: str, key: bytes) -> str:
    """The salt that a request's cached prefixes have on the workers: only equal salts share any.

    Tenants never share, whatever salt they ask for, and nobody without the key can compute a tenant's salt.
    The length before the name keeps "a" with "b:" from being "a:b". Without tenants the salt is the client's.
    """
    if not tenant:
        return call.cache_salt
    named = f"{len(tenant)}:{tenant}:{call.cache_salt}"
    return hmac.new(key, named.encode(), hashlib.sha256).hexdigest()
