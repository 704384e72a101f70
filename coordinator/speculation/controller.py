"""One arm for all sequences that share the workers' passes: the one with the highest goodput. Pure.

An arm is a plain round, a chain of K draft tokens, or a tree with a bound of its nodes and depth. Its goodput
is E / T: expected tokens of a round divided by its seconds (Liu et al. 2024, "Optimizing speculative decoding
for serving large language models using goodput"). If sequences differ, it is their mean, which maximises the
total tokens per second. Plain rounds are a valid answer.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import InitVar, dataclass, field

from coordinator.proposers.interface import Evidence, Guess
from coordinator.speculation.arms import DraftArm, DraftArms
from coordinator.speculation.cost_model import CostModel, bracket
from coordinator.speculation.draft_trees import DraftWorth, TreeGains
from coordinator.speculation.expected_tokens import Acceptance, DepthAcceptance, ReplayedAcceptance
from coordinator.speculation.exploration import SETTLING_ROUNDS, Exploration
from paceline.core.types import AcceptanceMode

POOL_MEMORY = 500.0
"""Number of verdicts that the pooled acceptance of a request kind remembers."""
HYSTERESIS = 0.03
"""Another arm must promise at least this share more than the current one."""
LEAD = 0.03
"""Drafting must promise at least this share more than plain decoding."""
READING = 8
"""While more than one in this many sequences has its prompt read, no time is measured and no trial begins."""
STARVED = 64
"""After this many rounds of each sequence without a measurement, rounds beside prompts are measured as well:
under such a load they are part of every arm's cost."""
STEADY_SHARE = 8
"""A round is measured if the number of sequences changed by at most one in this many while it ran."""
TRIAL_TOKENS = 6.0
"""Weight, in judged tokens, of earlier acceptance in a trial of drafting, because that evidence is old."""
GUESS_AGAIN = 64
"""One in this many rejected guesses of a pool is verified anyway, to keep its estimate current."""
FAR_BELOW = 0.75
"""A sequence drafts nothing if its own drafted rounds promise less than this share of the tokens per second
of plain rounds."""
HOTTEST = 4
"""Temperatures from this many halves on share one kind."""

RequestKind = tuple[AcceptanceMode, int]
"""Requests with pooled acceptance: acceptance mode, and temperature in halves, 0 for greedy."""


def kind_of(mode: AcceptanceMode, temperature: float) -> RequestKind:
    return mode, min(math.ceil(2 * temperature), HOTTEST)


@dataclass(slots=True)
class Controller:
    """State shared by all sequences of a coordinator."""

    max_draft: int
    max_nodes: InitVar[int] = 0
    """Most nodes of a tree; 0 if no sequence drafts trees."""
    arms: DraftArms = field(init=False)
    arm: int = 0
    """The number of the current arm of all sequences; up to `max_draft` it is K."""
    best: int = 0
    """The arm in use when no trial is in progress."""
    sequences: int = 0
    """Number of sequences with a round at the workers."""
    reading: int = 0
    """Number of sequences whose prompt or missing tokens a worker is reading."""
    catch_up: float = 0.0
    """Seconds that a draft worker needs for each missing token of a sequence; 0 until measured."""
    choosing: dict[int, DraftWorth] = field(default_factory=dict)
    """Drafts of the sequences at the workers whose arm is chosen here, by identity."""
    costs: CostModel = field(init=False)
    round_seconds: list[float] | None = None
    """Seconds of a round by arm at the current load; None until a round is measured. This and the next two
    are renewed with each decision."""
    verify_seconds: list[float] | None = None
    """Seconds of a verification by number of draft tokens."""
    goodput: list[float] | None = None
    """Expected tokens per second of a sequence, by arm."""
    _guesses: dict[Evidence, DepthAcceptance] = field(default_factory=dict)
    _unused_guesses: Counter[Evidence] = field(default_factory=Counter)
    _pools: dict[RequestKind, Acceptance] = field(default_factory=dict)
    _gains: dict[tuple[RequestKind, int], TreeGains] = field(default_factory=dict)
    _explorations: dict[int, Exploration] = field(default_factory=dict)
    _rounds: int = 0
    _settled_at: int = 0
    """Round count from which measurements are valid."""
    _measured_at: int = 0
    """Round count at the last measurement."""
    _decided_at: int = 0
    _load: int = 0

    def __post_init__(self, max_nodes: int) -> None:
        self.arms = DraftArms(self.max_draft, max_nodes)
        self.costs = CostModel(self.arms)

    # ---- what sequences report ---------------------------------------------------------------------

    def pool(self, kind: RequestKind) -> Acceptance:
        """The pooled acceptance of a request kind."""
        if kind not in self._pools:
            # Acceptance that depends on later tokens belongs to a depth in the proposal, not to a token.
            by_depth = kind[0].facts.whole_chain
            self._pools[kind] = DepthAcceptance(POOL_MEMORY) if by_depth else ReplayedAcceptance(POOL_MEMORY)
            self._pools[kind].expected(self.max_draft)
        return self._pools[kind]

    def gains(self, kind: RequestKind, width: int) -> TreeGains:
        """The gains of trees of this width for a request kind."""
        key = kind, width
        if key not in self._gains:
            self._gains[key] = TreeGains(self.arms, width)
        return self._gains[key]

    def guesses(self, guess: Guess) -> DepthAcceptance:
        """The pooled acceptance of guesses with the same evidence."""
        evidence = guess.evidence
        if evidence not in self._guesses:
            self._guesses[evidence] = DepthAcceptance(POOL_MEMORY, prior_rate=guess.prior_rate)
        return self._guesses[evidence]

    def leave(self, drafts: DraftWorth) -> None:
        """A sequence no longer has a round at the workers."""
        self.sequences -= 1
        self.choosing.pop(id(drafts), None)

    def measured(self, arm: DraftArm, drafting: float, verifying: float) -> None:
        """Learn from the seconds of one round."""
        self._measured_at = self._rounds
        self.costs.add(arm, drafting, verifying, self.sequences)

    def measured_guess(self, num_draft: int, seconds: float) -> None:
        """Learn from the verification of a guess. Among sequences with another arm its time is not used."""
        if self.sequences == 1:
            self.costs.add_verification(num_draft, seconds, 1)

    def caught_up(self, seconds: float, tokens: int) -> None:
        """Learn from a draft worker that read `tokens` missing tokens."""
        each = seconds / tokens
        self.catch_up += (each - self.catch_up) * (0.2 if self.catch_up else 1.0)

    # ---- what sequences ask ------------------------------------------------------------------------

    def retries(self, guess: Guess) -> bool:
        """True for one in `GUESS_AGAIN` guesses whose evidence does not seem to pay."""
        evidence = guess.evidence
        self._unused_guesses[evidence] += 1
        return self._unused_guesses[evidence] % GUESS_AGAIN == 0

    @property
    def settled(self) -> bool:
        """True if round times reflect the current arm."""
        return self._rounds >= self._settled_at

    @property
    def starved(self) -> bool:
        """True if no round was measured for so long that rounds beside prompts are measured as well."""
        return self._rounds - self._measured_at > STARVED * self._size

    @property
    def calm(self) -> bool:
        """True while few prompts are read."""
        return self.reading <= self.sequences // READING

    def steady_since(self, sequences: int) -> bool:
        """True if the number of sequences is about the same as at the start of the round."""
        return abs(self.sequences - sequences) * STEADY_SHARE <= self.sequences

    @property
    def trying(self) -> bool:
        """True while a trial is in progress."""
        return self._exploration.ends is not None

    def begin_round(self, drafts: DraftWorth, *, chooses: bool) -> None:
        """A sequence sends a round to the target: end or begin a trial, or decide again."""
        if chooses:
            self.choosing[id(drafts)] = drafts
        else:
            self.choosing.pop(id(drafts), None)
        size, load = self._size, bracket(self.sequences)
        if load != self._load:
            self._change_load(load)
        self._rounds += 1
        exploration = self._exploration
        exploration.count(size)
        if exploration.is_over:
            before = self.best
            self._decide()
            exploration.end(size, changed=self._regime(self.best) != self._regime(before))
            self._do(self.best)
        elif exploration.ends is not None:
            return
        elif self._rounds - self._decided_at >= size:
            self._decide()
            self._do(self.best)
        if self.choosing and exploration.is_due and (self.calm or self.starved):
            self._try(exploration)

    # ---- deciding ----------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return max(self.sequences, 1)

    @property
    def _exploration(self) -> Exploration:
        return self._explorations.setdefault(self._load, Exploration())

    def _change_load(self, load: int) -> None:
        exploration = self._exploration
        if exploration.ends is not None:
            exploration.end(self._size, changed=False)
        self._load = load
        self._decide()
        self._do(self.best)

    def _do(self, arm: int) -> None:
        if arm != self.arm:
            self.arm, self._settled_at = arm, self._rounds + SETTLING_ROUNDS * self._size

    def _regime(self, arm: int) -> range:
        return next((regime for regime in (self.arms.chains, self.arms.trees) if arm in regime), range(1))

    def _try(self, exploration: Exploration) -> None:
        if self.round_seconds is None or not self.max_draft:
            return
        regimes = [range(1)]
        if any(drafts.draws_chains for drafts in self.choosing.values()):
            regimes.append(self.arms.chains)
        if self.arms.trees and any(drafts.gains is not None for drafts in self.choosing.values()):
            regimes.append(self.arms.trees)
        # In a trial no sequence abstains.
        goodput = self._goodput(self.round_seconds, everyone=True)
        arm = exploration.begin(self.best, goodput, regimes, self._size)
        if arm is None:
            return
        if arm and not self.best:
            for pool in self._pools.values():
                pool.fade(TRIAL_TOKENS)
        self._do(arm)

    def _decide(self) -> None:
        self._decided_at = self._rounds
        self.round_seconds = self.costs.round_seconds(self._load)
        self.verify_seconds = self.costs.verify_seconds(self._load)
        if self.round_seconds is None:
            self.best = 0
            return
        self.goodput = self._goodput(self.round_seconds)
        if not self.choosing:
            self.best = 0
            return
        biased = [self.goodput[0] * (1 + LEAD), *self.goodput[1:]]
        arm = max(range(len(biased)), key=biased.__getitem__)
        # LEAD already serves as the hysteresis between plain decoding and drafting.
        if biased[arm] > (1 + HYSTERESIS * (arm > 0)) * biased[self.best]:
            self.best = arm

    def _goodput(self, seconds: list[float], *, everyone: bool = False) -> list[float]:
        plain, count = 1 / seconds[0], len(self.choosing)
        if not count:
            return [plain, *[0.0] * (len(seconds) - 1)]
        # As in `pays`. An arm that a sequence does not use has 0 tokens, any other at least 1.
        least = [1.0 if everyone else FAR_BELOW * each * plain for each in seconds]
        total = [0.0] * len(seconds)
        for drafts in self.choosing.values():
            for arm, (e, t, few) in enumerate(zip(drafts.expected(), seconds, least, strict=True)):
                total[arm] += e / t if e >= few else plain
        return [each / count for each in total]


def pays(expected: float, seconds: float, plain: float) -> bool:
    """False if drafted rounds promise a sequence far fewer tokens per second than plain ones."""
    return expected * plain >= FAR_BELOW * seconds
