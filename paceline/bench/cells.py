"""What was measured of one arm at one temperature and concurrency, and ratios between two of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.bench.arms import Arm
from paceline.bench.processor import PROCESSES
from paceline.client.results import GenerationResult, to_plain
from paceline.core.types import TokenOrigin
from paceline.decoding import theory

Place = tuple[int, int]
"""(repeat, workload): runs of two arms at the same place did the same work, one shortly after the other."""

PARTS = ("draft", "target", "queue", "wire", "coordinator")
"""Of a round's time, named as in the client's timings."""
_COUNTED = (
    "num_rounds",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_lookahead_hits",
    "num_prompt_lookups",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles. One value is its own quartiles."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    def over(self, divisor: float) -> Spread:
        """All three divided."""
        return Spread(self.median / divisor, self.q1 / divisor, self.q3 / divisor)


@dataclass(slots=True)
class Counts:
    """Sums over all requests of a cell; times in seconds."""

    requests: int = 0
    completion_tokens: int = 0
    num_rounds: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_lookahead_hits: int = 0
    num_prompt_lookups: int = 0
    num_rejected_draft_tokens: int = 0
    """Proposals that were not accepted whole: what follows a rejected token was not judged."""
    draft: float = 0.0
    target: float = 0.0
    queue: float = 0.0
    wire: float = 0.0
    coordinator: float = 0.0
    total: float = 0.0

    def add(self, result: GenerationResult) -> None:
        """Count one request."""
        stats = result.speculative_decoding
        self.requests += 1
        self.completion_tokens += len(result.token_ids)
        self.num_rejected_draft_tokens += result.origins.count(TokenOrigin.CORRECTION)
        for source, names in ((stats, _COUNTED), (result.timings, (*PARTS, "total"))):
            for name in names:
                setattr(self, name, getattr(self, name) + getattr(source, name))

    def __sub__(self, other: Counts) -> Counts:
        """What is left without a part of it."""
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part of a round."""
        return {name: _share(getattr(self, name), self.num_rounds) or 0.0 for name in PARTS}

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted; None when nothing was drafted."""
        return _share(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def alpha(self) -> float | None:
        """The theory's: accepted over judged."""
        return theory.measured_alpha(self.num_accepted_draft_tokens, self.num_rejected_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens of a round with a proposal: every other round has one."""
        return 1 + (_share(self.completion_tokens - self.num_rounds, self.num_spec_steps) or 0.0)

    @property
    def hit_rate(self) -> float | None:
        """Share of proposals that were there when the verdict came."""
        return _share(self.num_lookahead_hits, self.num_spec_steps)

    @property
    def draft_seconds_per_token(self) -> float | None:
        """Draft compute that rounds waited for, per draft token."""
        return _share(self.draft, self.num_draft_tokens)

    @property
    def target_seconds_per_round(self) -> float | None:
        """Target compute that one round waited for: rows that were computed ahead of it are not in it."""
        return _share(self.target, self.num_rounds)

    @property
    def coordinator_and_wire_share(self) -> float | None:
        """Of the rounds' time."""
        return _share(self.coordinator + self.wire, self.total)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(slots=True)
class Cell:
    """All runs of one arm at one temperature and concurrency."""

    arm: Arm
    temperature: float
    concurrency: int
    rates: dict[Place, float] = field(default_factory=dict)
    """Tokens per second of each run, over all clients."""
    decode_rates: dict[Place, float] = field(default_factory=dict)
    """The same from the first token on; only of Paceline's arms at one request."""
    client_cpu: list[float] = field(default_factory=list)
    """Share of each run in which the measuring process kept a core busy; a peer computes in it."""
    processor_seconds: dict[Place, dict[str, float]] = field(default_factory=dict)
    """Of each run, by role (`processor.PROCESSES`), the whole load; only of Paceline's arms."""
    counts: Counts = field(default_factory=Counts)
    opening: Counts = field(default_factory=Counts)
    """Of the same requests again, stopped after a few tokens: what their prompts cost. That shortens the last
    round of each."""

    def took(self, place: Place, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """One run's processor time, from readings that are empty where the system tells nothing."""
        if before and after:
            self.processor_seconds[place] = {role: after[role] - before[role] for role in after}

    @property
    def tokens_per_second(self) -> Spread:
        """Over all runs."""
        return Spread.of(list(self.rates.values()))

    @property
    def decoding(self) -> Counts:
        """The rounds after the opening, where that was measured; so passes over prompts are not in it."""
        return self.counts - self.opening

    @property
    def tokens_per_round(self) -> float | None:
        """Of all rounds but the first of each request, which reads the prompt and brings one token, without a
        proposal; None without another round.

        Not of `decoding`: an opening's last round brings what there is still room for, so a difference would
        give the rest of its tokens to other rounds, and more than K + 1 to each.
        """
        return _share(self.counts.completion_tokens - self.counts.requests, self._rounds_after_first)

    @property
    def seconds_per_round(self) -> dict[str, float]:
        """Mean of each part, of the rounds after the opening where that was measured.

        Drafting is then a draft token's time by the draft tokens of a round: an opening's last round has
        fewer of them.
        """
        parts = self.decoding.parts
        draft_tokens = _share(self.counts.num_draft_tokens, self._rounds_after_first)
        each = self.decoding.draft_seconds_per_token
        if self.opening.requests and draft_tokens is not None and each is not None:
            parts["draft"] = draft_tokens * each
        return parts

    @property
    def _rounds_after_first(self) -> int:
        return self.counts.num_rounds - self.counts.requests

    @property
    def processor_seconds_per_token(self) -> dict[str, float]:
        """By role, over all runs, prompts included; empty where it was not measured in each of them."""
        if self.processor_seconds.keys() != self.rates.keys() or not self.counts.completion_tokens:
            return {}
        runs = self.processor_seconds.values()
        return {role: sum(run[role] for run in runs) / self.counts.completion_tokens for role in PROCESSES}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        own: dict[str, Any] = {}
        if not self.arm.is_peer:
            c = self.counts
            own = {
                "counts": to_plain(c),
                "opening": to_plain(self.opening),
                "acceptance_rate": c.acceptance_rate,
                "alpha": c.alpha,
                "mean_acceptance_length": c.mean_acceptance_length,
                "hit_rate": c.hit_rate,
                "seconds_per_round": self.seconds_per_round,
                "coordinator_and_wire_share": self.decoding.coordinator_and_wire_share,
                "processor_seconds_per_token": self.processor_seconds_per_token or None,
            }
        return {
            **self.arm.to_dict(),
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "tokens_per_second": to_plain(self.tokens_per_second),
            "client_cpu": statistics.median(self.client_cpu),
            "runs": [
                {
                    "repeat": repeat,
                    "workload": workload,
                    "tokens_per_second": rate,
                    "decode_tokens_per_second": self.decode_rates.get((repeat, workload)),
                    "processor_seconds": self.processor_seconds.get((repeat, workload)),
                }
                for (repeat, workload), rate in self.rates.items()
            ],
            **own,
        }


def pooled(cells: Sequence[Cell]) -> Cell:
    """Of arms that do the same: the first one's cell, with the mean rate of all of them at every place that
    all were measured at. Its counts and times stay those of the first."""
    first = cells[0]
    places = [place for place in first.rates if all(place in cell.rates for cell in cells)]
    return replace(first, rates={p: statistics.fmean(cell.rates[p] for cell in cells) for p in places})


def ratio(of: Cell, to: Cell) -> Spread:
    """Of the rates, place by place: the median and quartiles of the pairs' ratios."""
    return _paired(of.rates, to.rates)


def decode_ratio(of: Cell, to: Cell) -> Spread | None:
    """The same from the first token on; None where that was not measured."""
    return _paired(of.decode_rates, to.decode_rates) if of.decode_rates.keys() & to.decode_rates else None


def _paired(of: Mapping[Place, float], to: Mapping[Place, float]) -> Spread:
    return Spread.of([rate / to[place] for place, rate in of.items() if place in to])


Key = tuple[Arm, float, int]


class Cells:
    """All cells of a run."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._cells: Mapping[Key, Cell] = {(c.arm, c.temperature, c.concurrency): c for c in cells}

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def find(self, arm: Arm, temperature: float, concurrency: int) -> Cell | None:
        """The cell, if that was measured."""
        return self._cells.get((arm, temperature, concurrency))

    def at(self, temperature: float, concurrency: int) -> list[Cell]:
        """All arms there, in the order they were measured."""
        return [
            c for c in self._cells.values() if (c.temperature, c.concurrency) == (temperature, concurrency)
        ]

    def peers(self, temperature: float) -> list[Cell]:
        """Other systems, at one request."""
        return [c for c in self.at(temperature, 1) if c.arm.is_peer]
