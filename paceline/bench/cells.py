"""Measurements of one arm at one temperature and concurrency, and ratios between two arms."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.bench.arms import Arm
from paceline.client.results import GenerationResult, to_plain
from paceline.core.types import TokenOrigin
from paceline.decoding import theory

Place = tuple[int, int]
"""(repeat, workload): two arms at the same place did the same work shortly after each other."""

PARTS = ("draft", "target", "queue", "wire", "coordinator")
"""Parts of a round's time, named as in the client's timings."""
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
    """Median and quartiles. A single value equals its quartiles."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)


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
    """Rejected draft tokens: at most one per round, because tokens after it are not verified."""
    draft: float = 0.0
    target: float = 0.0
    queue: float = 0.0
    wire: float = 0.0
    coordinator: float = 0.0
    total: float = 0.0

    def add(self, result: GenerationResult) -> None:
        """Count one request."""
        self.requests += 1
        self.completion_tokens += len(result.token_ids)
        self.num_rejected_draft_tokens += result.origins.count(TokenOrigin.CORRECTION)
        for source, names in (
            (result.speculative_decoding, _COUNTED),
            (result.timings, (*PARTS, "total")),
        ):
            for name in names:
                setattr(self, name, getattr(self, name) + getattr(source, name))

    def __sub__(self, other: Counts) -> Counts:
        """The difference of all sums."""
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def alpha(self) -> float | None:
        """Accepted over verified draft tokens, as in the theory; None without verified tokens."""
        return theory.measured_alpha(self.num_accepted_draft_tokens, self.num_rejected_draft_tokens)

    @property
    def hit_rate(self) -> float | None:
        """Share of proposals ready when the verdict arrived; None without proposals."""
        return _share(self.num_lookahead_hits, self.num_spec_steps)

    @property
    def tokens_per_round(self) -> float | None:
        """None without rounds."""
        return _share(self.completion_tokens, self.num_rounds)

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds per round of each part."""
        return {name: _share(getattr(self, name), self.num_rounds) or 0.0 for name in PARTS}

    @property
    def seconds_per_round(self) -> float | None:
        """Mean seconds per round, all parts together."""
        return _share(self.total, self.num_rounds)

    @property
    def draft_seconds_per_token(self) -> float | None:
        """Draft compute that rounds waited for, per draft token; None if nothing was drafted."""
        return _share(self.draft, self.num_draft_tokens)

    @property
    def coordinator_and_wire_share(self) -> float | None:
        """Share of queue, wire and coordinator in the rounds' time."""
        return _share(self.queue + self.wire + self.coordinator, self.total)


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
    """Tokens per second after the first token; only for Paceline's arms at concurrency 1."""
    client_cpu: list[float] = field(default_factory=list)
    """CPU time of the measuring process over the time of each run; a peer computes in this process."""
    counts: Counts = field(default_factory=Counts)
    opening: Counts = field(default_factory=Counts)
    """Sums over the same requests with one token; only for Paceline's arms at concurrency 1."""

    @property
    def tokens_per_second(self) -> Spread:
        """Spread over all runs."""
        return Spread.of(list(self.rates.values()))

    @property
    def decoding(self) -> Counts:
        """Sums without the first round of each request, which reads the prompt, if `opening` was measured."""
        return self.counts - self.opening

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        own: dict[str, Any] = {}
        if not self.arm.is_peer:
            own = {
                "counts": to_plain(self.counts),
                "opening": to_plain(self.opening),
                "alpha": self.counts.alpha,
                "hit_rate": self.counts.hit_rate,
                "tokens_per_round": self.decoding.tokens_per_round,
                "seconds_per_round": self.decoding.parts,
                "coordinator_and_wire_share": self.decoding.coordinator_and_wire_share,
            }
        return {
            "arm": self.arm.name,
            "k": self.arm.k,
            "lookahead": self.arm.lookahead,
            "prompt_lookup": self.arm.prompt_lookup,
            "tree_width": self.arm.tree_width,
            "max_tree_nodes": self.arm.max_tree_nodes,
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
                }
                for (repeat, workload), rate in self.rates.items()
            ],
            **own,
        }


Cells = Mapping[tuple[Arm, float, int], Cell]
"""All cells of a run by arm, temperature and concurrency, in the order they were measured."""


def cells_at(cells: Cells, temperature: float, concurrency: int) -> list[Cell]:
    """The cells of all arms at this temperature and concurrency."""
    return [c for c in cells.values() if (c.temperature, c.concurrency) == (temperature, concurrency)]


def pooled(cells: Sequence[Cell]) -> Cell:
    """Merge cells of equivalent arms: the first cell, with the mean rate at every place that all cells have.
    Counts and times are those of the first."""
    first = cells[0]
    places = [place for place in first.rates if all(place in cell.rates for cell in cells)]
    return replace(first, rates={p: statistics.fmean(cell.rates[p] for cell in cells) for p in places})


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median and quartiles of the ratios of rates at the same places."""

    value: float
    q1: float
    q3: float
    of: str
    to: str

    @classmethod
    def between(cls, of: Cell, to: Cell) -> Ratio:
        """Ratio for whole requests."""
        return cls._paired(of, of.rates, to, to.rates)

    @classmethod
    def decoding(cls, of: Cell, to: Cell) -> Ratio:
        """Ratio after the first token: the part that speculation accelerates, independent of the prompt."""
        return cls._paired(of, of.decode_rates, to, to.decode_rates)

    @classmethod
    def _paired(
        cls, of: Cell, rates: Mapping[Place, float], to: Cell, divisors: Mapping[Place, float]
    ) -> Ratio:
        spread = Spread.of([rate / divisors[place] for place, rate in rates.items() if place in divisors])
        return cls(spread.median, spread.q1, spread.q3, of.arm.name, to.arm.name)

    def over(self, divisor: float, name: str) -> Ratio:
        """This ratio divided by the value predicted by `name`."""
        return replace(self, value=self.value / divisor, q1=self.q1 / divisor, q3=self.q3 / divisor, to=name)
