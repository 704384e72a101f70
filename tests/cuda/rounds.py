"""Kinds of rounds: what a worker is asked on a CPU, asked and counted again on a pretended CUDA device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from draft_worker.engine import DraftEngine
from draft_worker.sampling import draw
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.structured import StructuredOutputs
from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from paceline.decoding import sampling, support
from target_worker.acceptance.items import VerifyItem
from target_worker.engine import TargetEngine
from target_worker.verify import verify_items
from tests.cuda.device import CPU, Counts, PretendedCuda
from tests.cuda.workers import BLOCK_SIZE, Models, draft_engine, models_on, target_engine
from tests.unit.grammar.tiny import VOCAB

Engine = TargetEngine | DraftEngine
Told = dict[str, tuple[Any, ...]]
"""What was answered to each sequence."""

NUM_ROUNDS: Final = 5
"""The first reads the prompts, two more may pass until its shapes are recorded; the last is counted."""
PROMPT: Final = 14
SEQUENCES: Final = 3
K: Final = 4
COUPLED, REJECTION, BLOCK = AcceptanceMode
ONE_WAIT: Final = 1
"""What a round of any kind is to wait for in the end: its answer."""


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of round of one worker."""

    name: str
    sampling: Mapping[str, Any]
    mode: AcceptanceMode = COUPLED
    k: int = K
    drafts: bool = False
    """The draft is asked, else the target."""
    accepted: int = 2
    """Draft tokens that are accepted each time, where the draft is asked."""
    branches: int = 0
    tree: bool = False
    """Beside each proposal stands a longer path of other tokens."""
    preempts: bool = False
    """The youngest sequence loses its blocks, and is read again when another one has ended."""

    @property
    def structured(self) -> bool:
        """The requests ask for a format."""
        return "structured_outputs" in self.sampling

    def params_of(self, sequence: int) -> SequenceParams:
        """Of each sequence its own seed."""
        asked = SamplingParams(seed=11 + sequence, max_tokens=100, **self.sampling)
        return SequenceParams(asked, self.mode, prompt_length=PROMPT)

    def engine_on(self, models: Models) -> Engine:
        """The worker that is asked."""
        if self.drafts:
            return draft_engine(models, structured=self.structured, branches=self.branches)
        return target_engine(models, structured=self.structured)


WARM: Final = {"temperature": 0.8}
GREEDY: Final = {"temperature": 0.0}
PENALTIES: Final = WARM | {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
STRUCTURED: Final = WARM | {"structured_outputs": StructuredOutputs(regex="[abc]{90}")}

KINDS: Final = (
    Kind("plain", WARM, k=0),
    Kind("plain, greedy", GREEDY, k=0),
    Kind("verification, coupled", WARM),
    Kind("verification, greedy", GREEDY),
    Kind("verification, rejection", WARM, REJECTION),
    Kind("verification, block", WARM, BLOCK),
    Kind("verification, penalties", PENALTIES),
    Kind("verification, trees, coupled", WARM, tree=True),
    Kind("verification, trees, rejection", WARM, REJECTION, tree=True),
    Kind("verification, trees, structured", STRUCTURED, tree=True),
    Kind("verification, structured", STRUCTURED),
    Kind("verification, preemption", WARM, preempts=True),
    Kind("draft, recorded chain", WARM, drafts=True),
    Kind("draft, after a full acceptance", WARM, drafts=True, accepted=K),
    Kind("draft, rejection", WARM, REJECTION, drafts=True),
    Kind("draft, penalties", PENALTIES, drafts=True),
    Kind("draft, structured", STRUCTURED, drafts=True),
    Kind("draft, lookahead branches", WARM, drafts=True, branches=8),
)


@dataclass
class Round:
    """What is asked at once, and what a CPU answers."""

    commands: list[Any]
    answers: Told = field(default_factory=dict)
    ahead: Told = field(default_factory=dict)
    """What is told ahead of the next round."""


@dataclass(frozen=True)
class Row:
    """What one round, or a part of one, takes on the device."""

    kind: str
    waits: int
    launches: int
    num_bytes: int
    where: Mapping[str, int]
    """The waits by reason and place."""
    aim: Mapping[str, int]
    """What it is to take in the end."""

    @classmethod
    def of(cls, kind: str, counts: Counts, aim: Mapping[str, int]) -> Row:
        """Of what was counted."""
        return cls(kind, counts.num_waits, counts.launches, counts.num_bytes, dict(counts.waits), aim)


@functools.cache
def script_of(kind: Kind) -> list[Round]:
    """The rounds of a kind, with the answers of a CPU."""
    models = models_on(CPU)
    # Of the same support a CPU draws in another order: the same distribution, and other tokens.
    with _blocks_left(kind, models), patch.object(draw, "draw_sparse", _drawn_in_tensors):
        return (_draft_script if kind.drafts else _target_script)(kind, models)


def play(kind: Kind, cuda: PretendedCuda, device: torch.device) -> tuple[list[Round], list[Row]]:
    """The same rounds on a device: what it answers, and what the last one took."""
    models = models_on(device)
    engine, played, rows = kind.engine_on(models), [], list[Row]()
    with _blocks_left(kind, models):
        for asked in script_of(kind):
            with cuda.counting() as counts:
                answers = answered(engine, asked.commands)
            with cuda.counting() as counts_ahead:
                ahead = worked_ahead(engine)
            played.append(Round(asked.commands, answers, ahead))
            rows = [Row.of(kind.name, counts, {"waits": ONE_WAIT})]
            if kind.branches:
                rows.append(Row.of(f"{kind.name}, ahead", counts_ahead, {}))
        _close(engine)
    return played, rows


def answered(engine: Engine, commands: Sequence[Any]) -> Told:
    """Ask, and work until all is answered."""
    events = [event for command in commands for event in engine.handle(command, 0.0)]
    asked = {c.sequence_id for c in commands if isinstance(c, VerifyRound | DraftRound)}
    told = _told(events)
    while asked - told.keys():
        told |= _told(engine.step())
    return told


def worked_ahead(engine: Engine) -> Told:
    """The last that a draft tells of each outcome until it has nothing to do."""
    told: dict[str, dict[Any, Any]] = {}
    for _ in range(200 if isinstance(engine, DraftEngine) else 0):
        if not engine.has_work:
            break
        for name, proposals in _told(engine.step()).items():
            told.setdefault(name, {}).update(proposals)
    return {name: tuple(sorted(proposals.items())) for name, proposals in told.items()}


def _told(events: Sequence[Any]) -> Told:
    told: Told = {}
    for event in events:
        match event:
            case RoundVerdict():
                told[event.sequence_id] = event.verdict.num_accepted, *event.verdict.token_ids
            case DraftProposal():
                told[event.sequence_id] = event.proposal.token_ids
            case SequenceFailed():
                told[event.sequence_id] = (type(event.error).__name__,)
            case Continuations():
                told[event.sequence_id] = tuple((tuple(o), p.token_ids) for o, p in event.proposals.items())
    return told


def _target_script(kind: Kind, models: Models) -> list[Round]:
    """Proposals are those of the draft."""
    draft = draft_engine(models, structured=kind.structured)
    target = kind.engine_on(models)
    ledgers, script = _prompts(), []
    for number in range(1, NUM_ROUNDS + 1):
        k = 0 if kind.preempts and number == 1 else kind.k
        asked = Round(_opening(kind) if number == 1 else [])
        for command in asked.commands:
            draft.handle(command, 0.0)
        if kind.preempts and number == NUM_ROUNDS:
            # What it held goes to the one that has been waiting.
            closing = CloseSequence("s0", 1)
            asked.commands.append(closing)
            draft.handle(closing, 0.0)
            del ledgers["s0"]
        for name, ledger in ledgers.items():
            proposal = _proposal_of(draft, name, number, ledger, k)
            if kind.tree:
                proposal = _beside_another(proposal)
            asked.commands.append(VerifyRound(name, 1, number, len(ledger), tuple(ledger), proposal))
        asked.answers = answered(target, asked.commands)
        for name, (_, *tokens) in asked.answers.items():
            ledgers[name] += tokens  # none of a sequence that has to wait
        script.append(asked)
    _close(target)
    _close(draft)
    return script


def _drawn_in_tensors(
    scores: torch.Tensor, u: torch.Tensor, mass: float, bound: int
) -> tuple[list[int], list[SparseDistribution]]:
    """`draw_sparse` as it is on a device."""
    tokens, *drawn_from = support.draw_in_tensors(scores, u, mass, bound)
    return tokens.tolist(), sampling.to_sparse(*drawn_from)


def _proposal_of(draft: Engine, name: str, number: int, ledger: Sequence[int], k: int) -> Proposal:
    if not k:
        return Proposal()
    events = list(draft.handle(DraftRound(name, 1, number, len(ledger), tuple(ledger), k), 0.0))
    while not any(isinstance(event, DraftProposal) for event in events):
        events += draft.step()
    (proposal,) = [event.proposal for event in events if isinstance(event, DraftProposal)]
    return proposal


def _beside_another(chain: Proposal) -> Proposal:
    """A tree of the chain and a longer path of other tokens, so that accepted entries are moved."""
    k, others = chain.num_draft_tokens, tuple((token + 1) % VOCAB for token in (*chain.token_ids, 0))
    points = tuple(
        SparseDistribution(np.array(token, "<u4").tobytes(), np.array(1, "<f4").tobytes()) for token in others
    )
    sent = chain.distributions + points if chain.distributions else ()
    return Proposal(chain.token_ids + others, (*range(-1, k - 1), -1, *range(k, 2 * k)), sent)


def _draft_script(kind: Kind, models: Models) -> list[Round]:
    """Verdicts accept equally many tokens each time; one that was foreseen where the draft looks ahead."""
    draft = kind.engine_on(models)
    ledgers, script = _prompts(), []
    for number in range(1, NUM_ROUNDS + 1):
        asked = Round(_opening(kind) if number == 1 else [])
        for name, ledger in ledgers.items():
            asked.commands.append(DraftRound(name, 1, number, len(ledger), tuple(ledger), kind.k))
        asked.answers = answered(draft, asked.commands)
        asked.ahead = worked_ahead(draft)
        for name, ledger in ledgers.items():
            tokens, foreseen = asked.answers[name], asked.ahead.get(name, ())
            if foreseen:
                ((accepted, following, _), _), *_ = foreseen
            else:
                # Tokens of the draft's own, which a format permits.
                accepted, following = kind.accepted, tokens[min(kind.accepted, kind.k - 1)]
            ledger += [*tokens[:accepted], following]
        script.append(asked)
    _close(draft)
    return script


def _prompts() -> dict[str, list[int]]:
    return {f"s{i}": [(3 + i + 5 * j + j * j) % VOCAB for j in range(PROMPT)] for i in range(SEQUENCES)}


def _opening(kind: Kind) -> list[Any]:
    return [
        OpenSequence(name, 1, tuple(prompt), kind.params_of(i))
        for i, (name, prompt) in enumerate(_prompts().items())
    ]


def _close(engine: Engine) -> None:
    for i in range(SEQUENCES):
        engine.handle(CloseSequence(f"s{i}", 1), 0.0)


@contextlib.contextmanager
def _blocks_left(kind: Kind, models: Models) -> Iterator[None]:
    """Where a kind preempts, all blocks but one less than its sequences need are taken."""
    table = models.target.new_table()
    if kind.preempts:
        # Two for each: a prompt fills most of the first, a verification begins the second.
        table.reserve((table.pool.free_blocks - 2 * SEQUENCES + 1) * BLOCK_SIZE)
    try:
        yield
    finally:
        table.free()


JUDGED: Final = 16
"""Rounds of K + 1 rows that are judged together."""
JUDGINGS: Final[dict[str, tuple[Mapping[str, Any], AcceptanceMode, int]]] = {
    "coupled": (WARM, COUPLED, 40),
    "greedy": (GREEDY, COUPLED, 40),
    "rejection": (WARM, REJECTION, 150),
    "block": (WARM, BLOCK, 150),
}
"""Parameters, mode, and how many launches it is to take in the end."""


def judging_name(name: str) -> str:
    """Of the row of one of `JUDGINGS`."""
    return f"judging {JUDGED} x {K + 1} rows, {name}"


def judged(name: str, cuda: PretendedCuda, device: torch.device) -> tuple[Row, Sequence[Outcome | None]]:
    """What judging 16 rounds of 5 rows takes when it is done the second time, and what it says."""
    asked, mode, launches = JUDGINGS[name]
    items, logits = judged_items(asked, mode), judged_logits().to(device)
    verify_items(items, logits, logits)
    with cuda.counting() as counts:
        outcomes = verify_items(items, logits, logits)
    return Row.of(judging_name(name), counts, {"waits": ONE_WAIT, "launches": launches}), outcomes


@functools.cache
def _judged_params(mode: AcceptanceMode, asked: tuple[tuple[str, Any], ...]) -> list[SequenceParams]:
    return [Kind("", dict(asked), mode).params_of(i) for i in range(JUDGED)]


def judged_items(asked: Mapping[str, Any], mode: AcceptanceMode) -> list[VerifyItem]:
    """Rounds whose draft tokens are drawn from the same few, equally likely."""
    ids, shares = np.arange(8, dtype="<u4").tobytes(), np.full(8, 1 / 8, dtype="<f4").tobytes()
    sent = (SparseDistribution(ids, shares),) * K if mode.facts.needs_q else ()
    all_params = _judged_params(mode, tuple(asked.items()))
    return [
        VerifyItem(params, range(PROMPT), Proposal(tuple((i + j) % 8 for j in range(K)), (), sent))
        for i, params in enumerate(all_params)
    ]


def judged_logits() -> torch.Tensor:
    """float32 [16 * 5, V]."""
    return torch.randn(JUDGED * (K + 1), VOCAB, generator=torch.Generator().manual_seed(3))


def all_rows(cuda: PretendedCuda, device: torch.device, say: Callable[[str], None]) -> list[Row]:
    """The rows of all kinds; `say` is told of each kind that is begun."""
    rows = []
    for kind in KINDS:
        say(kind.name)
        rows += play(kind, cuda, device)[1]
    return rows + [judged(name, cuda, device)[0] for name in JUDGINGS]
