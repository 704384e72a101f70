"""Rounds of both workers in this process: plain, speculative, and with drafting ahead of verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from draft_worker.drafters.model import ModelDrafter
from draft_worker.engine import DraftEngine
from paceline.core.clock import monotonic
from paceline.core.config import DraftConfig, TargetConfig
from paceline.core.messages import (
    CloseSequence,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from target_worker.engine import TargetEngine
from tools.gpu_check.checks.judging import WARM
from tools.gpu_check.models import Runners, new_pair, runners_of
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import K

_WARM_UP: Final = 4
"""Rounds until the prompts are read and every shape is recorded."""
_BRANCHES: Final = 8


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of round."""

    name: str
    mode: AcceptanceMode = AcceptanceMode.COUPLED
    k: int = K
    sampling: Mapping[str, Any] = field(default_factory=lambda: WARM)
    branches: int = 0


_KINDS: Final = (
    _Kind("plain", k=0),
    _Kind("speculative"),
    _Kind("speculative, greedy", sampling={"temperature": 0.0}),
    _Kind("speculative, rejection", AcceptanceMode.REJECTION),
    _Kind("speculative, block", AcceptanceMode.BLOCK),
    _Kind("lookahead", branches=_BRANCHES),
)


def _cases(bench: Bench) -> Iterator[Case]:
    device, sizes = bench.device, bench.sizes
    target, draft = new_pair(device, sizes.target, sizes.draft_layers, sizes.dtype)
    most = max(sizes.running) * (sizes.prompt + (K + 1) * (sizes.rounds + _WARM_UP) + 256)
    # Branches take blocks of their own beside those of the sequences.
    drafts = runners_of(device, draft, 3 * most, share=0.3)
    targets = runners_of(device, target, most)
    for count in sizes.running:
        for kind in _KINDS:
            name = f"{kind.name}, {count} sequence{'s' * (count > 1)}"
            yield name, lambda kind=kind, count=count: _Play(bench, targets, drafts, kind, count).figures()


class _Play:
    """Some sequences through rounds of one kind, one worker after the other."""

    def __init__(self, bench: Bench, targets: Runners, drafts: Runners, kind: _Kind, count: int) -> None:
        self._bench, self._kind = bench, kind
        target, draft = (each.recording(bench.device.new_recorder()).runner for each in (targets, drafts))
        longest = target.max_model_len
        common: dict[str, Any] = {"vocabulary_size": bench.sizes.target.vocabulary, "max_model_len": longest}
        config = DraftConfig(model="random", prefix_cache=False, lookahead_branches=kind.branches)
        self._target = TargetEngine(target, TargetConfig(model="random", prefix_cache=False), **common)
        self._draft = DraftEngine(ModelDrafter(draft, config, monotonic), config, **common)
        self._ledgers = {f"s{i}": self._prompt(i) for i in range(count)}
        self._round = 0
        self.accepted = self.tokens = 0
        self.seconds = {"draft": 0.0, "target": 0.0, "ahead": 0.0}

    def figures(self) -> Figures:
        """Play the rounds; tokens a second count one worker's time after the other's, without `ahead`."""
        try:
            self._open()
            for _ in range(_WARM_UP):
                self._play_round()
            self._forget()
            for _ in range(self._bench.sizes.rounds):
                self._play_round()
            return self._told() | {"waits_of_a_round": self._bench.device.waits(self._play_round)}
        finally:
            for name in self._ledgers:
                for engine in (self._target, self._draft):
                    engine.handle(CloseSequence(name, 1), 0.0)

    def _told(self) -> Figures:
        rounds = self._bench.sizes.rounds
        each = {f"{name}_ms": 1e3 * seconds / rounds for name, seconds in self.seconds.items() if seconds}
        drafted = rounds * len(self._ledgers) * self._kind.k
        figures = {
            "tokens_per_second": self.tokens / (self.seconds["draft"] + self.seconds["target"]),
            "tokens_per_round": self.tokens / rounds / len(self._ledgers),
            **each,
        }
        if drafted:
            figures["accepted_share"] = self.accepted / drafted
        if self._kind.branches:
            ahead = self._draft.lookahead
            figures["foreseen_share"] = ahead.hits / max(1, ahead.rounds)
        return figures

    def _forget(self) -> None:
        self.accepted = self.tokens = 0
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _prompt(self, number: int) -> list[int]:
        sizes = self._bench.sizes
        generator = torch.Generator().manual_seed(number)
        return torch.randint(3, sizes.target.vocabulary, (sizes.prompt,), generator=generator).tolist()

    def _open(self) -> None:
        for i, (name, prompt) in enumerate(self._ledgers.items()):
            sampling = SamplingParams(seed=11 + i, max_tokens=100_000, **self._kind.sampling)
            params = SequenceParams(sampling, self._kind.mode, prompt_length=len(prompt))
            self._ask(self._target, [OpenSequence(name, 1, tuple(prompt), params)])
            if self._kind.k:
                self._ask(self._draft, [OpenSequence(name, 1, tuple(prompt), params)])

    def _play_round(self) -> None:
        self._round += 1
        proposals = self._drafted() if self._kind.k and self._round > 1 else {}
        with self._timed("target"):
            verdicts = self._ask(
                self._target,
                [
                    VerifyRound(
                        name, 1, self._round, len(ledger), tuple(ledger), proposals.get(name, Proposal())
                    )
                    for name, ledger in self._ledgers.items()
                ],
            )
        for name, event in verdicts.items():
            assert isinstance(event, RoundVerdict)
            self._ledgers[name] += event.verdict.token_ids
            self.accepted += event.verdict.num_accepted
            self.tokens += len(event.verdict.token_ids)

    def _drafted(self) -> dict[str, Proposal]:
        with self._timed("draft"):
            events = self._ask(
                self._draft,
                [
                    DraftRound(name, 1, self._round, len(ledger), tuple(ledger), self._kind.k)
                    for name, ledger in self._ledgers.items()
                ],
            )
        if self._kind.branches:
            with self._timed("ahead"):
                while self._draft.has_work:
                    self._draft.step()
        return {name: event.proposal for name, event in events.items() if isinstance(event, DraftProposal)}

    def _ask(self, engine: TargetEngine | DraftEngine, commands: Sequence[Any]) -> dict[str, Any]:
        """The answers to rounds; nothing to other commands. Raises Failed for a refusal."""
        events: list[Any] = [event for command in commands for event in engine.handle(command, monotonic())]
        asked = {c.sequence_id for c in commands if isinstance(c, VerifyRound | DraftRound)}
        while True:
            told = {e.sequence_id: e for e in events if isinstance(e, RoundVerdict | DraftProposal)}
            for event in events:
                if isinstance(event, SequenceFailed):
                    raise Failed(f"round {self._round} of {event.sequence_id}: {event.error}")
            if not asked - told.keys():
                return told
            events += engine.step()

    def _timed(self, name: str) -> _Timer:
        return _Timer(self.seconds, name)


class _Timer:
    """Adds the time of a block. A worker's answer is on the host, so its time includes the device's."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._begun = seconds, name, 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._begun


CHECK = Check("rounds", "plain, speculative and lookahead rounds of an 8B target", _cases, minutes=2.0)
