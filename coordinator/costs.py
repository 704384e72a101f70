"""What a round takes, as measured: seconds over draft tokens, for every load. Pure.

A round of one sequence takes the visible drafting (nothing when the verdict was foreseen) and the time
from its VerifyRound to the verdict: wire, queue and the target's pass. Both depend on how many sequences
run, since they share passes and often cores, so they are kept apart by load; and the second depends on
what everybody else drafts, since their rows are in the same pass.

Times are measured as the coordinator sees them. Whatever slows a round is in them, also what no model
of the parts would know: cores that draft and target share, passes that split, a busy event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.curves import KNOWN, MEMORY, Cell, Curve, Shape

SHORTEST = 1e-6
"""Seconds that no round is faster than."""
PACE = 1 / 16
"""Share of a measurement in how fast everything is now, where as much is known of its kind as a mean
remembers; less with less: what the first rounds of a kind took is no measure of how fast all else is."""
MANY = 8
SCATTERED_FEW, SCATTERED = 0.6, 0.85
"""What a row that one of several sequences adds to their plain passes costs, as a share of a plain round of
one of them, while that is not measured: of few, and of so many or more, where passes are long and hardly any
of that is reading the weights."""
COMPARED, LATELY = 0.3, 0.8
"""Of what rounds with copies take beside others: the squared tokens of a round that count for as much as what
timed passes say, and the share that a finding keeps of its say when the next one comes."""
LEAST_OF_ROWS = 0.5
"""Of what rows of prompts take, the part that draft tokens take at least where more sequences run."""
STRAY = 3.0
"""A time this many times the usual one says no more than that of how fast everything is."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Of rounds with copies beside rounds without (copying.py)."""

    copied: float
    """Tokens more that a round copied."""
    longer: float
    """By what share of a round without them it lasted longer."""


@dataclass(slots=True)
class Copies:
    """What copies of the text add to the plain passes of all.

    All sequences draft, or none does. Who copies is mostly alone with it, beside others that have one row.
    """

    plain: Cell = field(default_factory=Cell)
    """Of rounds whose pass had no such rows."""
    copied: Cell = field(default_factory=Cell)
    """The others'."""
    _squares: float = 0.0
    _products: float = 0.0
    """Sums over what comparisons found: of squared tokens, and of tokens times what they added to a round."""

    def observe(self, more: float, seconds: float, weight: float) -> None:
        """Take in a round whose pass had so many copied tokens a sequence."""
        (self.copied if more else self.plain).observe(more, seconds, weight, STRAY)

    def seconds(self, plain: float, guess: Sequence[float]) -> list[float]:
        """Of rounds with 0, 1, 2, … copied tokens where a plain one takes `plain`.

        They count for what all others wait as well: a row for each sequence. `guess` while nothing is known.
        """
        seconds = list(guess)
        known = self.copied.weight if self.plain.weight >= KNOWN else 0.0
        if known:
            row = max(0.0, self.copied.seconds / max(self.plain.seconds, SHORTEST) - 1) / self.copied.tokens
            seconds = _mixed(plain, row, known, seconds, KNOWN)
        if self._squares:
            row = max(0.0, self._products / self._squares)
            seconds = _mixed(plain, row, self._squares, seconds, COMPARED)
        return seconds

    def compared(self, found: Finding) -> None:
        """Take in what rounds with copies take beside those without: a line from none on (least squares)."""
        self._squares = LATELY * self._squares + found.copied**2
        self._products = LATELY * self._products + found.copied * found.longer


def _mixed(plain: float, row: float, weight: float, seconds: Sequence[float], other: float) -> list[float]:
    """`seconds` with weight `other`, and those that each row makes longer by a share of `plain`."""
    return [(weight * plain * (1 + row * k) + other * t) / (weight + other) for k, t in enumerate(seconds)]


@dataclass(slots=True)
class Load:
    """Costs while about so many sequences run."""

    verdict: Curve = field(default_factory=lambda: Curve(growth=0.1, outlier=3.0, of_rows=True))
    """From VerifyRound to verdict, over the draft tokens that all sequences have on average."""
    drafting: Curve = field(default_factory=lambda: Curve(growth=0.3, outlier=math.inf))
    """Of drafting that the sequence had to wait for, over its own draft tokens; often nothing.

    More of them are taken to take little longer until that is measured: a trial finds out what was hoped for
    in vain, and nothing finds out what was feared.
    """
    copies: Copies = field(default_factory=Copies)
    """From VerifyRound to verdict, while nobody has drafts."""
    pace: float = 1.0
    """How slow everything is now, over what it was for all of these.

    A machine that others use too, or that is hot, slows down and recovers within seconds. What is done
    shows it, and what was last done a while ago would have slowed down as much.
    """

    def judged(self, tokens: float, seconds: float, weight: float = 1.0, *, trial: bool = False) -> None:
        """Take in the time to a verdict. On trial it is the draft tokens that make the difference."""
        usual = None if trial else self.verdict.usual(tokens)
        if usual is None:
            self.verdict.observe(tokens, seconds / self.pace, weight)
            return
        # What one measurement misses by is divided between the pace and the mean. Were the mean told of what
        # the pace makes of it, a long time would seem shorter for having raised the pace: the mean would sink
        # and the pace rise without end, and all that is not done meanwhile would seem slower and slower.
        error = min(max(seconds / (usual.seconds * self.pace), 1 / STRAY), STRAY) - 1
        share = PACE * weight * usual.weight / MEMORY
        self.pace *= math.exp(share * error)
        self.verdict.correct(tokens, (1 - share) * error, weight)

    def copied(self, more: float, seconds: float, weight: float = 1.0) -> None:
        """Take in the time to a verdict while nobody had drafts, with so many copied tokens a sequence."""
        self.copies.observe(more, seconds / self.pace, weight)

    def proposed(self, num_draft: int, seconds: float, weight: float = 1.0) -> None:
        """Take in the time that a proposal was waited for.

        One that takes many times as long as others, or as a plain round, met a stall. Without a bound the few
        times of a first trial would speak against drafting for good: what seems far too slow is not tried
        again.
        """
        plain = self.verdict.usual(0)
        most = math.inf
        if plain is not None:
            own = self.drafting.usual(num_draft)
            most = STRAY * max(plain.seconds, own.seconds if own is not None else 0.0)
        self.drafting.observe(num_draft, min(seconds / self.pace, most), weight)

    def shape(self, curve: Curve, like: Shape | None, slope: float = 0.0) -> Shape | None:
        """Of one of the two, as things are now; `like` is of another load, `slope` of this one."""
        shape = curve.shape(self._before(like), slope / self.pace)
        return shape.times(self.pace) if shape is not None else None

    def seconds(self, curve: Curve, most: int, like: Shape | None, slope: float = 0.0) -> list[float] | None:
        """The same for 0 to `most` draft tokens."""
        seconds = curve.seconds(most, self._before(like), slope / self.pace)
        return [self.pace * x for x in seconds] if seconds is not None else None

    def _before(self, like: Shape | None) -> Shape | None:
        return like.times(1 / self.pace) if like is not None else None


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Of a round in which everybody has 0, 1, 2, … draft tokens."""

    verify: list[float]
    """From VerifyRound to verdict: all of it where nobody waits for a draft."""
    whole: list[float]
    """With the drafting that is waited for."""
    beside: float
    """Of a round without draft tokens while others draft. It shares their passes, or waits for them."""
    copied: list[float]
    """From VerifyRound to verdict, of 0, 1, 2, … tokens copied while the others have none."""

    @property
    def beside_drafts(self) -> list[float]:
        """`whole`, of a sequence among others that draft."""
        return [self.beside, *self.whole[1:]]


@dataclass(slots=True)
class Costs:
    """Costs of a pair of workers at every load, doubling from one to the next."""

    loads: dict[int, Load] = field(default_factory=dict)

    def knows_drafting(self, sequences: int) -> bool:
        """True once proposals were timed at this load or one next to it: from afar nothing can be said."""
        here = bracket(sequences)
        near = (self.loads.get(there) for there in (here - 1, here, here + 1))
        return any(load is not None and load.drafting.cells for load in near)

    def at(self, sequences: int) -> Load:
        """The costs of this load, to add to."""
        here = bracket(sequences)
        if here not in self.loads:
            self.loads[here] = Load()
        return self.loads[here]

    def round_seconds(self, sequences: int, most: int, row: float = 0.0) -> RoundSeconds | None:
        """Of rounds with 0 to `most` draft tokens; None when nothing is known.

        What was not measured at this load is taken from the nearest one that has it; of a pass, what each row
        takes. `row` is what one of a prompt takes, as far as that is known: where nothing tells what draft
        tokens add, they add as much.
        """
        here = before = bracket(sequences)
        verdict = drafting = None
        # From far to near, so that every load shapes what the nearer ones do not know.
        for there in sorted(self.loads, key=lambda b: (-abs(b - here), b)):
            load, verdict = self.loads[there], _as_of(verdict, before, there, row)
            verdict = load.shape(load.verdict, verdict, row * 2.0**there)
            drafting, before = load.shape(load.drafting, drafting), there
        own = self.loads.get(here, Load())
        verify = own.seconds(own.verdict, most, _as_of(verdict, before, here, row), row * 2.0**here)
        draft = own.seconds(own.drafting, most, drafting)
        if verify is None:
            return None
        # Rows never take less time than none.
        verify = [max(v, verify[0]) for v in verify]
        waits = [0.0, *draft[1:]] if draft is not None else [0.0] * len(verify)
        whole = [max(v + d, SHORTEST) for v, d in zip(verify, waits, strict=True)]
        # All that not drafting saves there is the time that one draft token more takes.
        beside = max(whole[0], 2 * whole[1] - whole[2]) if most > 1 else whole[0]
        verify = [max(v, SHORTEST) for v in verify]
        copied = own.copies.seconds(verify[0], _copied(sequences, verify)) if sequences > 1 else verify
        return RoundSeconds(verify, whole, beside, copied)

    def draft_share(self, sequences: int, num_draft: int) -> float:
        """Of a round with so many draft tokens, the share that is waited for the draft; 0 when not known."""
        load = self.at(sequences)
        drafting, verdicts = load.drafting.cells.get(num_draft), load.verdict.cells.values()
        weight = sum(cell.weight for cell in verdicts)
        if drafting is None or not weight:
            return 0.0
        verdict = sum(cell.weight * cell.seconds for cell in verdicts) / weight
        return drafting.seconds / max(drafting.seconds + verdict, SHORTEST)


def _as_of(shape: Shape | None, load: int, other: int, row: float) -> Shape | None:
    """What is known of passes at one load, for another one.

    Where more sequences run a draft token of each takes at least a part of what as many rows of prompts do: a
    few rounds at another load, perhaps met by chance, promise little of what is arithmetic by then.
    """
    if shape is None or load == other:
        return shape
    return shape.among(2.0 ** (other - load), LEAST_OF_ROWS * row * least(other) if other > load else 0.0)


def _copied(sequences: int, verify: Sequence[float]) -> list[float]:
    """What copies take beside plain rounds of so many, as long as that was not measured."""
    if sequences >= MANY:
        return [max(t, verify[0] * (1 + SCATTERED * k)) for k, t in enumerate(verify)]
    return [min(t, verify[0] * (1 + SCATTERED_FEW * k)) for k, t in enumerate(verify)]


def bracket(sequences: int) -> int:
    """Loads that share measurements: 1, 2, 3 to 4, 5 to 8, 9 to 16 and so on."""
    return (max(sequences, 1) - 1).bit_length()


def least(load: int) -> int:
    """Sequences of which it is the bracket, at least."""
    return (1 << (load - 1)) + 1 if load else 1


def weight(sequences: int) -> float:
    """Of one measurement where so many share a pass: they tell nearly the same, and not quite."""
    return 1 / math.sqrt(max(sequences, 1))


def sampling(sequences: int) -> int:
    """Verdicts of which one is timed: more tell hardly more of the same pass, and take time themselves."""
    return 1 + sequences // 4
