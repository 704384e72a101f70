"""Ledgers, round machines and calls, with defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from coordinator.app import Coordinator
from coordinator.round.machine import RoundMachine
from coordinator.round.state import RoundState
from coordinator.sequence.ledger import Ledger
from coordinator.sequence.messages import Deadlines
from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import FixedLength
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams, SpeculationParams
from paceline.rpc.codec import GenerateCall, Resumption
from tests.sim.reference import LetterDetokenizer

DEADLINES = Deadlines(draft=1.0, target=10.0, recovery=100.0)


def make_ledger(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    eos: Iterable[int] = (),
    max_model_len: int = 100,
    choice: int = 0,
    detokenizer: Any = None,
    **sampling: Any,
) -> Ledger:
    """With seed 1, and a letter a token."""
    return Ledger(
        prompt,
        SamplingParams(**({"seed": 1} | sampling)),
        detokenizer=detokenizer or LetterDetokenizer(),
        eos_token_ids=frozenset(eos),
        max_model_len=max_model_len,
        choice=choice,
    )


def make_machine(
    prompt: Sequence[int] = (1, 2, 3),
    k: int = 0,
    *,
    name: str = "s",
    eos: Iterable[int] = (),
    max_model_len: int = 100,
    draft_max_len: int = 0,
    vocabulary: int = 20,
    deadline: float | None = None,
    choice: int = 0,
    drafts: int = 1,
    **sampling: Any,
) -> RoundMachine:
    """In coupled mode, with a fixed K."""
    ledger = make_ledger(prompt, eos=eos, max_model_len=max_model_len, choice=choice, **sampling)
    params = SequenceParams(SamplingParams(**({"seed": 1} | sampling)), AcceptanceMode.COUPLED, len(prompt))
    policy = FixedLength(Controller(k), k)
    lengths = (vocabulary, max_model_len)
    state = RoundState(
        name, ledger, params, k, policy, DEADLINES, *lengths, deadline=deadline, num_drafts=drafts
    )
    for draft in state.drafts.views:
        draft.max_len = draft_max_len
    return RoundMachine(state)


def make_call(
    prompt: str | Sequence[int] = (5, 6),
    *,
    name: str = "r",
    received: Sequence[int] | None = None,
    resumable: bool = False,
    **sampling: Any,
) -> GenerateCall:
    """With `received`, one that goes on with a request of which so much was received."""
    asked = SamplingParams(**({"max_tokens": 50, "seed": 1} | sampling))
    given = prompt if isinstance(prompt, str) else tuple(prompt)
    call = GenerateCall(name, given, asked, SpeculationParams(), resumable=resumable or received is not None)
    if received is None:
        return call
    return replace(call, resumption=Resumption((len(received),), (tuple(received),)))


async def pass_through(served: Coordinator, call: GenerateCall) -> None:
    """Begin a request, and leave it at once."""
    async with served.generating(call):
        pass
