"""From cells to what they mean: the ratios, and the figures of the theory beside them.

Theory is Leviathan et al. 2023, section 3: alpha is the acceptance of a draft token that was judged, c the
draft's compute of one token over the target's plain step, both measured without lookahead, because the
theorem knows a draft that runs before its verification, not beside it. It knows no prompt either: times and
speed-ups that are set beside it leave the pass over the prompt out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench import arms
from paceline.bench.arms import Arm
from paceline.bench.cells import Cell, Cells, Spread, decode_ratio, pooled, ratio
from paceline.bench.config import BenchConfig
from paceline.decoding import theory

RATIOS = (
    "speculative_over_plain",
    "whole_speculative_over_plain",
    "lookahead_over_without",
    "over_generate",
    "over_assisted_generation",
    "measured_over_theory",
    "measured_over_theory_with_costs",
    "worst_over_plain",
    "auto_over_best_fixed",
    "worst_plain_over_itself",
    "served_over_plain",
    "served_over_generate",
    "served_over_prompt_lookup",
)
BY_K = (
    "without_lookahead_over_plain",
    "speculative_over_plain",
    "lookahead_over_without",
    "measured_over_theory",
    "measured_over_theory_with_costs",
)
"""Ratios at one request that there is one of for every fixed K; with the first K they are among RATIOS, all
but the first of them."""
GENERATE = "transformers generate"
ASSISTED = "transformers assisted generation"
PROMPT_LOOKUP = "transformers prompt lookup"
"""Every peer arm whose name begins so counts; the fastest one is the ratio's divisor."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of rates, with the quartiles of its pairs and the concurrency it was found at."""

    value: float
    q1: float
    q3: float
    concurrency: int
    of: str
    to: str

    @classmethod
    def between(cls, of: Cell, to: Cell) -> Ratio:
        """Of two cells at one concurrency."""
        return cls.of_spread(ratio(of, to), of, to.arm.name)

    @classmethod
    def of_spread(cls, spread: Spread, of: Cell, to: str) -> Ratio:
        """Of one that was computed."""
        return cls(spread.median, spread.q1, spread.q3, of.concurrency, of.arm.name, to)


@dataclass(frozen=True, slots=True)
class Figures:
    """What explains the ratios of one K at one request and one temperature. None: not measured, or nothing
    drafted."""

    k: int
    alpha: float | None
    """Accepted over judged draft tokens, without lookahead."""
    c: float | None
    """Draft compute of one draft token over the target's plain step, without lookahead."""
    hit_rate: float | None
    """Rounds whose proposal was there when the verdict came, over rounds with a proposal."""
    hidden_draft_share: float | None
    """1 - the draft time a round waits for with lookahead over the same without."""
    predicted: float | None
    """Speed-up by theorem 3.8 from alpha, c and K."""
    predicted_with_rows: float | None
    """The same with `verification_over_step` for the step that the theorem takes a round's pass for."""
    predicted_with_costs: float | None
    """The theorem for rounds that have all their costs: the drafting that lookahead does not hide, the
    target's time, queue, wire and coordinator. Plain rounds have the last three too."""
    measured: float | None
    """Speed-up of decoding with lookahead, from the first token on."""
    measured_without_lookahead: float | None
    free_draft_bound: float | None
    """Tokens a round, the speed-up if drafting cost nothing: (1 - alpha^(K+1)) / (1 - alpha)."""
    verification_over_step: float | None
    """Target compute that a round with K draft tokens waits for, over a plain step, without lookahead; the
    theorem takes it to be 1. Not what K + 1 rows cost: a row that was computed ahead is not in it."""
    target_step_seconds: float | None
    """Compute of one plain round."""
    bandwidth_floor_seconds: float | None
    """The time to read all weights of the target once at the measured bandwidth."""
    target_step_over_floor: float | None
    coordinator_and_wire_share: float | None
    """Of a round with lookahead."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _compared(
    cells: Cells, config: BenchConfig, temperature: float, k: int
) -> tuple[Cell | None, Cell | None, Cell | None]:
    """At one request: plain decoding, and K draft tokens without and with lookahead."""
    return (
        cells.find(arms.plain(config), temperature, 1),
        cells.find(arms.drafting(config, k, lookahead=False), temperature, 1),
        cells.find(arms.drafting(config, k, lookahead=True), temperature, 1),
    )


def figures(
    cells: Cells, config: BenchConfig, temperature: float, k: int, floor_seconds: float | None
) -> Figures:
    """The figures of K at one request; `floor_seconds` is the target's bandwidth floor."""
    plain, without, ahead = _compared(cells, config, temperature, k)
    step = plain.decoding.target_seconds_per_round if plain else None
    alpha = without.counts.alpha if without else None
    draft = without.decoding.draft_seconds_per_token if without else None
    visible = ahead.decoding.draft_seconds_per_token if ahead else None
    waited = without.decoding.target_seconds_per_round if without else None
    c = _over(draft, step)
    c = None if c is None else max(0.0, c)  # a difference of two measurements
    hidden = _over(visible, draft)
    verification = _over(waited, step)
    return Figures(
        k=k,
        alpha=alpha,
        c=c,
        hit_rate=ahead.counts.hit_rate if ahead else None,
        hidden_draft_share=None if hidden is None else 1 - hidden,
        predicted=_predicted(alpha, c, k),
        predicted_with_rows=_predicted(alpha, c, k, verification) if verification else None,
        predicted_with_costs=_with_costs(alpha, k, ahead, plain),
        measured=_decode_speedup(ahead, plain),
        measured_without_lookahead=_decode_speedup(without, plain),
        free_draft_bound=None if alpha is None else theory.expected_tokens(alpha, k),
        verification_over_step=verification,
        target_step_seconds=step,
        bandwidth_floor_seconds=floor_seconds,
        target_step_over_floor=_over(step, floor_seconds),
        coordinator_and_wire_share=ahead.decoding.coordinator_and_wire_share if ahead else None,
    )


def _predicted(alpha: float | None, c: float | None, k: int, verification: float = 1.0) -> float | None:
    """Theorem 3.8; `verification` is the target's time that a round waits for, in plain steps."""
    if alpha is None or c is None:
        return None
    return theory.speedup(alpha, c, k, row_cost=(verification - 1) / k)


def _with_costs(alpha: float | None, k: int, ahead: Cell | None, plain: Cell | None) -> float | None:
    """Theorem 3.8 with every cost of a round in it, in steps of the target."""
    if alpha is None or ahead is None or plain is None:
        return None
    parts, plain_parts = ahead.decoding.parts, plain.decoding.parts
    step, visible = plain_parts["target"], ahead.decoding.draft_seconds_per_token
    if not step or visible is None:
        return None

    def between(parts: Mapping[str, float]) -> float:
        return sum(parts[name] for name in ("queue", "wire", "coordinator")) / step

    row_cost = (parts["target"] / step - 1) / k
    speedup = theory.speedup(alpha, visible / step, k, overhead=between(parts), row_cost=row_cost)
    return speedup * (1 + between(plain_parts))


def _decode_speedup(of: Cell | None, to: Cell | None) -> float | None:
    spread = _decode_spread(of, to)
    return spread.median if spread else None


def _decode_spread(of: Cell | None, to: Cell | None) -> Spread | None:
    return decode_ratio(of, to) if of and to else None


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def by_k(
    cells: Cells, config: BenchConfig, temperature: float, theory_says: Figures
) -> dict[str, Ratio | None]:
    """The ratios of one K, `theory_says.k`, named as in BY_K; None where an arm was not measured."""
    plain, without, ahead = _compared(cells, config, temperature, theory_says.k)
    return {
        "without_lookahead_over_plain": _decoding(without, plain),
        "speculative_over_plain": _decoding(ahead, plain),
        "lookahead_over_without": _decoding(ahead, without),
        "measured_over_theory": _over_theory(ahead, plain, theory_says.predicted),
        "measured_over_theory_with_costs": _over_theory(ahead, plain, theory_says.predicted_with_costs),
    }


def ratios(
    cells: Cells, config: BenchConfig, temperature: float, theory_says: Figures
) -> dict[str, Ratio | None]:
    """The ratios at one temperature, named as in RATIOS; None where an arm was not measured.

    `theory_says` is of the first K.
    """

    def at_one(arm: Arm) -> Cell | None:
        return cells.find(arm, temperature, 1)

    def each_over_plain(arm: Arm) -> Iterable[Ratio | None]:
        for n in config.concurrency:
            cell = cells.find(arm, temperature, n)
            yield _between(cell, base_of(cell, cells, config) if cell else None)

    ahead = at_one(arms.drafting(config, config.k[0]))
    served = at_one(arms.served(config))
    found = by_k(cells, config, temperature, theory_says) | {
        "whole_speculative_over_plain": _between(ahead, at_one(arms.plain(config))),
        "over_generate": _between(ahead, _fastest(_named(cells, temperature, GENERATE))),
        "over_assisted_generation": _between(ahead, _fastest(_named(cells, temperature, ASSISTED))),
        "worst_over_plain": _worst(each_over_plain(arms.served(config))),
        "auto_over_best_fixed": _worst(_each_auto_over_fixed(cells, config, temperature)),
        "worst_plain_over_itself": _worst(each_over_plain(arms.plain_again(config))),
        "served_over_plain": _decoding(served, at_one(arms.plain(config))),
        "served_over_generate": _between(served, _fastest(_named(cells, temperature, GENERATE))),
        "served_over_prompt_lookup": _between(served, _fastest(_named(cells, temperature, PROMPT_LOOKUP))),
    }
    return {name: found[name] for name in RATIOS}


def base_of(cell: Cell, cells: Cells, config: BenchConfig) -> Cell | None:
    """Plain decoding as it stands beside a cell: of both plain arms where there are two, since one run of
    many requests differs from the next by a tenth; of the first one beside the second."""
    plain, again = (
        cells.find(arm, cell.temperature, cell.concurrency)
        for arm in (arms.plain(config), arms.plain_again(config))
    )
    if plain is None or again is None or cell.arm in (plain.arm, again.arm):
        return plain
    return pooled([plain, again])


def _each_auto_over_fixed(cells: Cells, config: BenchConfig, temperature: float) -> Iterable[Ratio | None]:
    for n in config.concurrency:
        auto = cells.find(arms.automatic(config), temperature, n)
        if auto is None:
            continue
        drafting = [cells.find(arm, temperature, n) for arm in arms.fixed(config) if arm.k]
        fixed = [base_of(auto, cells, config), *drafting]
        yield _between(auto, _fastest([cell for cell in fixed if cell]))


def _named(cells: Cells, temperature: float, prefix: str) -> list[Cell]:
    return [cell for cell in cells.peers(temperature) if cell.arm.name.startswith(prefix)]


def _fastest(candidates: Sequence[Cell]) -> Cell | None:
    return max(candidates, key=lambda cell: cell.tokens_per_second.median, default=None)


def _between(of: Cell | None, to: Cell | None) -> Ratio | None:
    return Ratio.between(of, to) if of and to else None


def _decoding(of: Cell | None, to: Cell | None) -> Ratio | None:
    """From the first token on: what speculation makes faster, however long the prompt is."""
    spread = _decode_spread(of, to)
    return Ratio.of_spread(spread, of, to.arm.name) if of and to and spread else None


def _over_theory(ahead: Cell | None, plain: Cell | None, predicted: float | None) -> Ratio | None:
    spread = _decode_spread(ahead, plain)
    if ahead is None or spread is None or not predicted:
        return None
    return Ratio.of_spread(spread.over(predicted), ahead, "theorem 3.8")


def _worst(candidates: Iterable[Ratio | None]) -> Ratio | None:
    found = [candidate for candidate in candidates if candidate]
    return min(found, key=lambda r: r.value, default=None)
