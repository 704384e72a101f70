"""Chooses K and the shape of a sequence's drafts: `GoodputPolicy`, `TablePolicy` and `FixedLength`. Pure.

The coordinator measures the seconds. All policies of a coordinator share a `Controller`, so requests with a
fixed K also contribute acceptance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.proposers.interface import Evidence, Guess
from coordinator.speculation.arms import PLAIN, DraftArm
from coordinator.speculation.controller import Controller, RequestKind, pays
from coordinator.speculation.draft_trees import DraftWorth
from coordinator.speculation.expected_tokens import DepthAcceptance
from paceline.core.types import CHAIN, AcceptanceMode, Proposal, Timings, TreeShape, Verdict

SEQUENCE_MEMORY = 200.0
"""Number of verdicts that a sequence's own acceptance remembers."""
POOL_TOKENS = 40.0
"""Weight of the pool's acceptance in a sequence's own, in judged tokens: about a dozen rounds."""
CATCH_UP = 16
"""A draft worker that lacks at most this many tokens is not catching up: its wait measures drafting."""
RETRY_FIRST, RETRY_LAST = 32, 512
"""Rounds without drafting after which an abstaining sequence starts afresh, at first and at most."""
REVIEW = 8
"""Drafted rounds between two checks of a sequence's own acceptance."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Duration of a verification."""

    seconds: float
    """Seconds since the round was sent."""
    prefill_rows: int = 0
    """Prompt rows that the round waited for, in the target's pass and before it."""

    @classmethod
    def of(cls, seconds: float, timings: Timings) -> Verification | None:
        """None if the worker did not report the contents of the pass."""
        if not timings.sequences:
            return None
        return cls(seconds, timings.prefill_rows + timings.prefill_rows_before)


def likeliest(guesses: Sequence[Guess]) -> Guess:
    """The guess with the highest prior acceptance; the first among equals."""
    return max(guesses, key=lambda guess: guess.prior_rate)


@dataclass(slots=True)
class Policy(ABC):
    """Chooses K and the shape for one sequence, and learns from its rounds."""

    controller: Controller
    num_speculative_tokens: int
    """K, or the largest K."""
    kind: RequestKind = (AcceptanceMode.COUPLED, 0)
    tree: TreeShape = CHAIN
    """Bounds of this sequence's trees; `CHAIN` if it drafts none."""
    draws_chains: bool = True
    """False if every proposal is to be a tree."""
    drafts: DraftWorth = field(init=False)
    _guesses: dict[Evidence, DepthAcceptance] = field(default_factory=dict)
    _joined: bool = False
    _chooses: bool = False
    """True if the controller chose the arm of the next round, so that a draft can be asked."""
    _chosen: DraftArm = PLAIN
    """Of the next round."""
    _sent: DraftArm = PLAIN
    """Of the round at the target."""
    _reads: bool = False
    _drafting: float = 0.0
    """Seconds that the round waited for its proposal."""
    _clean: bool = True
    """True if this round's time reflects the controller's arm."""
    _sequences: int = 0
    """The controller's number of sequences when the round was sent."""

    def __post_init__(self) -> None:
        controller = self.controller
        chain = controller.pool(self.kind).child(SEQUENCE_MEMORY, POOL_TOKENS)
        gains = None if self.tree.is_chain else controller.gains(self.kind, self.tree.width)
        self.drafts = DraftWorth(controller.arms, chain, gains, self.draws_chains)

    @abstractmethod
    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """K of the next round, 0 to `most`. Called at most once a round, possibly during the previous round.

        Args:
            most: number of draft tokens that could be used.
            lacking: number of ledger tokens that the draft worker does not have.
            remaining: number of tokens that the sequence may still generate.
        """

    def shape(self, k: int) -> TreeShape:
        """Bounds of the tree of a round for which `choose` gave `k`, its depth."""
        del k
        return self.tree

    def choose_guess(self, guesses: Sequence[Guess], most: int, num_draft: int) -> Guess | None:
        """The guess to verify instead of asking the draft, cut to its best length; None for the draft.

        The value of a round is its expected tokens minus the price of its time (Dinkelbach 1967). The price
        is the mean tokens per second of all sequences, or of this sequence if that is higher. The best guess
        is taken if its value exceeds the draft's.

        Args:
            guesses: at most one of each source; not empty.
            most: number of tokens that could be used; positive.
            num_draft: K that `choose` gave for this round; 0 also without a usable draft.
        """
        controller = self.controller
        rounds, verifications, goodput = (
            controller.round_seconds,
            controller.verify_seconds,
            controller.goodput,
        )
        if rounds is None or verifications is None or goodput is None:
            best = likeliest(guesses)
            return best.cut(self._guess_lengths(min(most, len(best.token_ids)))[-1])
        # A request may have larger bounds than the controller, whose estimates end there.
        greatest = controller.max_draft
        drafted, seconds = self._drafted(num_draft), rounds[self._arm(num_draft)]
        price = max(goodput[controller.arm], drafted / seconds)
        best, length, worth = guesses[0], 0, -math.inf
        for guess in guesses:
            lengths = self._guess_lengths(min(most, len(guess.token_ids)))
            expected = self._guessed(guess).expected(lengths[-1])
            for n in lengths:
                value = expected[n] - price * verifications[min(n, greatest)]
                if value > worth:
                    best, length, worth = guess, n, value
        better = worth > drafted - price * seconds
        return best.cut(length) if better or controller.retries(best) else None

    def on_draft_request(self, lacking: int) -> None:
        """The draft is asked for a proposal. It lacks `lacking` tokens of the ledger."""
        self._read(lacking > CATCH_UP)
        self._clean = self._clean and lacking <= CATCH_UP

    def on_proposal(self, proposal: Proposal, seconds: float, lacking: int, prefill: float = 0.0) -> None:
        """A proposal arrived `seconds` after the request for it; 0 if it was drafted ahead.

        `prefill` is the worker's time in seconds for reading the missing tokens of this sequence.
        """
        self._drafting = seconds
        if proposal.token_ids and lacking > CATCH_UP:
            self.controller.caught_up(prefill, lacking)

    def on_verify(self, proposal: Proposal, *, prefills: bool) -> None:
        """A proposal, possibly empty, was sent to the target, which reads the prompt first if `prefills`."""
        self._read(prefills)
        if not self._joined:
            self._joined = True
            self.controller.sequences += 1
        self.controller.begin_round(self.drafts, chooses=self._chooses)
        self._chooses = False
        self._sent, self._chosen = self._chosen, PLAIN
        self._sequences = self.controller.sequences

    def on_verdict(
        self, proposal: Proposal, verdict: Verdict, timing: Verification | None, guess: Guess | None = None
    ) -> None:
        """A verdict came on a guess, or else on the draft's proposal.

        `timing` is None if the target read the prompt first.
        """
        self._read(False)
        if guess is not None:
            self._guessed(guess).observe(proposal.num_draft_tokens, verdict.num_accepted)
        elif proposal.token_ids:
            self._learn(proposal, verdict)
        if timing is not None:
            self._measure(proposal, timing, guessed=guess is not None)
        self._drafting, self._clean = 0.0, True

    def on_suspend(self) -> None:
        """The sequence has no round at the workers until the next `on_verify`, if there is one."""
        self._read(False)
        if self._joined:
            self._joined = False
            self.controller.leave(self.drafts)

    def _guessed(self, guess: Guess) -> DepthAcceptance:
        """This sequence's acceptance of guesses with the same evidence."""
        evidence = guess.evidence
        if evidence not in self._guesses:
            self._guesses[evidence] = self.controller.guesses(guess).child(SEQUENCE_MEMORY, POOL_TOKENS)
        return self._guesses[evidence]

    def _guess_lengths(self, most: int) -> Sequence[int]:
        """Lengths that a guess may be cut to, ascending; `most` is positive."""
        return range(1, min(most, self.num_speculative_tokens) + 1)

    def _learn(self, proposal: Proposal, verdict: Verdict) -> None:
        if self._sent.nodes:
            # A draft that answers with a chain has drafted a tree of one path.
            parents = proposal.parents or range(-1, proposal.num_draft_tokens - 1)
            path = verdict.accepted_nodes or range(verdict.num_accepted)
            self.drafts.observe(self._sent, parents, path)
        else:
            # Chains of several drafts are merged to a tree, which brings more than one chain as long.
            self.drafts.chain.observe(proposal.depth, verdict.num_accepted)

    def _arm(self, num_draft: int) -> int:
        """The number of the arm of a round with K = `num_draft`."""
        return self.controller.arms.nearest(DraftArm(num_draft, self.shape(num_draft).nodes))

    def _drafted(self, num_draft: int) -> float:
        """Expected tokens of a round with K = `num_draft`."""
        if num_draft and self.shape(num_draft).nodes:
            return self.drafts.expected()[self._arm(num_draft)]
        return self.drafts.chain.expected(num_draft)[-1]

    def _use(self, k: int, most: int) -> int:
        self._clean = k <= most and self.controller.settled
        k = min(k, most)
        self._chosen = DraftArm(k, self.shape(k).nodes) if k else PLAIN
        return k

    def _measure(self, proposal: Proposal, timing: Verification, *, guessed: bool) -> None:
        controller, sent = self.controller, self._sent
        if not (self._clean and controller.settled and controller.steady_since(self._sequences)):
            return
        if (timing.prefill_rows or not controller.calm) and not controller.starved:
            return
        num_draft = proposal.num_draft_tokens
        if guessed:
            controller.measured_guess(num_draft, timing.seconds)
            return
        if not (num_draft and sent.nodes):
            # The draft may have sent less than was asked, or nothing.
            sent = DraftArm(proposal.depth)
        if sent == controller.arms.each[controller.arm] or not controller.choosing:
            controller.measured(sent, self._drafting, timing.seconds)

    def _read(self, now: bool) -> None:
        self.controller.reading += now - self._reads
        self._reads = now


@dataclass(slots=True)
class FixedLength(Policy):
    """The same K in every round."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """K, or as many tokens as can be used."""
        return self._use(self.num_speculative_tokens, most)

    def choose_guess(self, guesses: Sequence[Guess], most: int, num_draft: int) -> Guess | None:
        """Propose up to K guessed tokens if there is no draft to ask."""
        if num_draft:
            return Policy.choose_guess(self, guesses, most, num_draft)
        return likeliest(guesses).cut(min(most, self.num_speculative_tokens))

    def _guess_lengths(self, most: int) -> Sequence[int]:
        return (min(most, self.num_speculative_tokens),)


@dataclass(slots=True)
class TablePolicy(Policy):
    """K by the number of sequences at the workers, from a table. No trials."""

    table: Sequence[tuple[int, int, int]] = ()
    """Rows of (lowest number, highest number, K), ascending; the last K holds above the last row."""

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """The K of the row for the current number of sequences."""
        rows = [k for _, highest, k in self.table if self.controller.sequences <= highest]
        return self._use(rows[0] if rows else self.table[-1][2], most)


@dataclass(slots=True)
class GoodputPolicy(Policy):
    """The controller's arm, except for a sequence whose own drafts do not pay."""

    _number: int = 0
    """The number of the arm that was chosen last."""
    _rounds: int = 0
    """Rounds since the last check of its acceptance, or since it began to abstain."""
    _abstains: bool = False
    _retry_after: int = RETRY_FIRST

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        """The K of all sequences, or 0 if this one gains nothing by drafting."""
        controller = self.controller
        self._chooses = True
        arm = self._own(controller.arm)
        late = lacking > CATCH_UP and not self._repays(arm, lacking, remaining)
        if arm and not controller.trying and (late or not self._takes_part(arm)):
            arm = 0
        self._number = arm
        chosen = self._use(controller.arms.each[arm].depth, most)
        self._clean = self._clean and arm == controller.arm
        return chosen

    def shape(self, k: int) -> TreeShape:
        """The tree of the chosen arm, or a chain."""
        nodes = self.controller.arms.each[self._number].nodes
        return self.tree._replace(nodes=min(nodes, self.tree.nodes)) if k and nodes else CHAIN

    def _own(self, number: int) -> int:
        """The controller's arm, or the other kind's with the same K if this sequence does not draft such."""
        arms = self.controller.arms
        if number in arms.trees and self.tree.is_chain:
            return arms.each[number].depth
        if number in arms.chains and not self.draws_chains:
            return arms.nearest(arms.each[number]._replace(nodes=1))
        return number

    def _repays(self, arm: int, lacking: int, remaining: int) -> bool:
        """True if the rest of the sequence saves more time than the draft worker needs to catch up."""
        seconds = self.controller.round_seconds
        if seconds is None:
            return True
        gained = remaining * (seconds[0] - seconds[arm] / max(self.drafts.expected()[arm], 1.0))
        return gained > lacking * self.controller.catch_up

    def _takes_part(self, arm: int) -> bool:
        """False while its own acceptance is far too low. It starts afresh at doubling intervals."""
        self._rounds += 1
        if self._abstains:
            if self._rounds < self._retry_after:
                return False
            self.drafts.chain.fade(0.0)
            self._abstains, self._rounds = False, 0
            self._retry_after = min(2 * self._retry_after, RETRY_LAST)
        elif self._rounds >= REVIEW:
            seconds, self._rounds = self.controller.round_seconds, 0
            drafted = self.drafts.expected()[arm]
            self._abstains = seconds is not None and not pays(drafted, seconds[arm], seconds[0])
        return not self._abstains
