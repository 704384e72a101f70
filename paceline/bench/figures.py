"""Figures computed from cells: ratios of rates, and predictions of the theory.

The theory is Leviathan et al. 2023, section 3: alpha is the acceptance rate of verified draft tokens, c the
draft's compute per token over the target's plain step. Both are measured without lookahead, because the
theorem assumes that drafting precedes verification. It also ignores prompts: times and speed-ups compared
with it exclude the round that reads the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench import arms
from paceline.bench.cells import Cell, Cells, Ratio, cells_at, pooled
from paceline.bench.config import BenchConfig
from paceline.decoding import theory

GENERATE = "transformers generate"
ASSISTED = "transformers assisted generation"
"""Prefixes of peer arms; the fastest matching arm is the ratio's divisor."""


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """Effect of K draft tokens per round on one request. None: nothing was drafted, or no peer was
    measured."""

    temperature: float
    k: int
    speculative_over_plain: Ratio
    """With lookahead, after the first token."""
    lookahead_over_without: Ratio
    """After the first token."""
    over_generate: Ratio | None
    """For whole requests, as peers are measured."""
    over_assisted_generation: Ratio | None
    measured_over_theory: Ratio | None
    """`speculative_over_plain` over `predicted`."""
    alpha: float | None
    """Accepted over verified draft tokens, without lookahead."""
    c: float | None
    """Draft compute per draft token over the target's plain step, without lookahead."""
    predicted: float | None
    """Speed-up by theorem 3.8 from alpha, c and K."""
    predicted_with_costs: float | None
    """The theorem's tokens per round, divided by the measured time of a round with lookahead over that of a
    plain round. That time includes the target's rows, queue, wire and coordinator, but not hidden
    drafting."""
    hit_rate: float | None
    """Rounds whose proposal was ready when the verdict arrived, over rounds with a proposal."""
    verification_over_step: float | None
    """Target compute of a round with K draft tokens over a plain step, without lookahead; 1 in the theorem.
    Rows computed in advance are excluded."""
    coordinator_and_wire_share: float | None
    """Share of queue, wire and coordinator in the time of a round with lookahead."""
    target_step_seconds: float
    """Target compute of one plain round."""
    bandwidth_floor_seconds: float
    """Time to read all weights of the target once at the measured bandwidth."""


def speculation(cells: Cells, temperature: float, k: int, floor_seconds: float) -> SpeculationFigures:
    """Figures from the cells at concurrency 1; `floor_seconds` is the target's bandwidth floor."""
    plain = cells[arms.PLAIN, temperature, 1]
    without, ahead = (cells[arms.drafting(k, lookahead=x), temperature, 1] for x in (False, True))
    step = plain.decoding.parts["target"]
    alpha, c = without.counts.alpha, _over(without.decoding.draft_seconds_per_token, step)
    predicted = None if alpha is None or c is None else theory.speedup(alpha, c, k)
    rounds = _over(ahead.decoding.seconds_per_round, plain.decoding.seconds_per_round)
    speedup = Ratio.decoding(ahead, plain)
    return SpeculationFigures(
        temperature=temperature,
        k=k,
        speculative_over_plain=speedup,
        lookahead_over_without=Ratio.decoding(ahead, without),
        over_generate=_over_peer(ahead, cells, GENERATE),
        over_assisted_generation=_over_peer(ahead, cells, ASSISTED),
        measured_over_theory=speedup.over(predicted, "theorem 3.8") if predicted else None,
        alpha=alpha,
        c=c,
        predicted=predicted,
        predicted_with_costs=None if alpha is None else _over(theory.expected_tokens(alpha, k), rounds),
        hit_rate=ahead.counts.hit_rate,
        verification_over_step=_over(without.decoding.parts["target"], step),
        coordinator_and_wire_share=ahead.decoding.coordinator_and_wire_share,
        target_step_seconds=step,
        bandwidth_floor_seconds=floor_seconds,
    )


@dataclass(frozen=True, slots=True)
class Service:
    """The service with default settings, for whole requests."""

    temperature: float
    concurrency: int
    served_over_plain: Ratio
    auto_over_best_fixed: Ratio
    """Automatic K, without prompt lookup, over the fastest fixed K including 0."""
    plain_over_itself: Ratio | None
    """Noise of the other two ratios: a ratio between equivalent arms. None at concurrency 1."""


def service(cells: Cells, config: BenchConfig, temperature: float, concurrency: int) -> Service:
    """Figures from the cells at this concurrency."""

    def of(arm: arms.Arm) -> Cell:
        return cells[arm, temperature, concurrency]

    base = base_of(cells, temperature, concurrency)
    fixed = [base, *(of(arm) for arm in arms.fixed(config) if arm.k)]
    again = of(arms.AGAIN) if concurrency > 1 else None
    return Service(
        temperature=temperature,
        concurrency=concurrency,
        served_over_plain=Ratio.between(of(arms.served(config)), base),
        auto_over_best_fixed=Ratio.between(of(arms.automatic(config)), max(fixed, key=_rate)),
        plain_over_itself=Ratio.between(again, of(arms.PLAIN)) if again else None,
    )


def base_of(cells: Cells, temperature: float, concurrency: int) -> Cell:
    """Plain decoding, averaged over its two arms if both exist, because runs with many requests differ by
    about 10 %."""
    plain = cells[arms.PLAIN, temperature, concurrency]
    again = cells.get((arms.AGAIN, temperature, concurrency))
    return pooled([plain, again]) if again else plain


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _over_peer(of: Cell, cells: Cells, prefix: str) -> Ratio | None:
    found = [c for c in cells_at(cells, of.temperature, 1) if c.arm.is_peer and c.arm.name.startswith(prefix)]
    return Ratio.between(of, max(found, key=_rate)) if found else None


def _rate(cell: Cell) -> float:
    return cell.tokens_per_second.median
