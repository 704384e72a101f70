"""A pair of workers as a queueing model, and clients that ask again as soon as they are answered.

For the policy alone: no tokens, no messages, only times and coin flips. Both workers serve in batches: the
target one pass at a time over all rounds that wait, the draft one step at a time over all proposals in
progress. Messages take a while, and the coordinator handles one at a time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from coordinator.proposers.interface import Guess
from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import Policy, Verification
from paceline.core.types import CHAIN, Proposal, TreeShape, Verdict
from tests.sim.rounds import accepting, chain, children, following, tree

MAX_K = 8
NOTHING = chain(0)
RANKS = (0.4, 0.2, 0.1)
"""Where a draft's first token is wrong, how often its second, third, … is right."""
TREE_ROWS = 3
"""Rows of a tree in a pass of the draft: up to its width."""


@dataclass(frozen=True)
class Machine:
    """Seconds of everything. The defaults are a small pair on two cores."""

    target_step: float = 6e-3
    target_sequence: float = 3e-4
    target_row: float = 3e-4
    draft_step: float = 5e-4
    draft_sequence: float = 5e-5
    draft_token: float = 3e-5
    """Of prefill and catching up."""
    wire: float = 3e-4
    message: float = 5e-5
    contention: float = 1.0
    """How much longer a pass of either worker takes while the other one is busy."""
    noise: float = 0.1


def constant(acceptance: float) -> Callable[[int, float], Callable[[int], float]]:
    """The same for every token."""
    return lambda number, now: lambda generated: acceptance


def text_of_all_kinds(number: int, now: float) -> Callable[[int], float]:
    """Easy and hard stretches of a dozen tokens, as in code."""
    kinds = random.Random(number).choices([0.1, 0.35, 0.6, 0.75, 0.9, 0.97], k=20)
    return lambda generated: kinds[generated // 12 % 20]


@dataclass(frozen=True, slots=True)
class Always:
    """The same K and shape in every round, as `FixedLength`, but without learning, which is half of the time
    that simulating takes."""

    num_draft: int
    tree: TreeShape = CHAIN

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        return min(self.num_draft, most)

    def shape(self, k: int) -> TreeShape:
        return self.tree

    def choose_guess(self, guesses: Sequence[Guess], most: int, num_draft: int) -> Guess | None:
        return None

    def on_draft_request(self, lacking: int) -> None: ...

    def on_proposal(self, proposal: Proposal, seconds: float, lacking: int, prefill: float = 0.0) -> None: ...

    def on_verify(self, proposal: Proposal, *, prefills: bool) -> None: ...

    def on_verdict(
        self, proposal: Proposal, verdict: Verdict, timing: Verification | None, guess: Guess | None = None
    ) -> None: ...

    def on_suspend(self) -> None: ...


@dataclass(eq=False)
class Job:
    """One sequence's place in the loop."""

    policy: Policy
    acceptance: Callable[[int], float]
    """Of a draft token, by the number of tokens that its sequence has generated."""
    remaining: int
    length: int
    drafted_to: int = 0
    proposal: Proposal = NOTHING
    lacking: int = 0
    """When it was asked for a proposal."""
    unread: int = 0
    """Of these, what the draft still has to read."""
    prefill: float = 0.0
    """Seconds that reading them took."""
    sent_at: float = 0.0
    first: bool = True
    steps_left: int = 0
    generated: int = 0
    planned: int | None = None
    """K of the next round, where it was chosen while this one lasts."""
    number: int = 0
    """Of its round, for the coordinator."""
    answered: int = 0
    """Rounds that the target has judged."""
    prefill_before: int = 0
    """Rows of prompts that it waited for until its pass."""
    plain_after: int = 0
    """The round after which the target begins a plain one by itself."""


@dataclass
class ClosedLoop:
    """`concurrency` clients for as long as asked."""

    machine: Machine
    concurrency: int
    acceptance: Callable[[int, float], Callable[[int], float]]
    """By the sequence's number and when it starts."""
    make: Callable[[Controller], Policy]
    tokens: int = 96
    prompt: int = 40
    seed: int = 0
    ranks: tuple[float, ...] = RANKS
    max_nodes: InitVar[int] = 0
    """Most nodes of a tree that the policies choose."""
    controller: Controller = field(init=False)
    now: float = 0.0
    made: int = 0
    drafted: int = 0

    def __post_init__(self, max_nodes: int) -> None:
        self.controller = Controller(MAX_K, max_nodes)
        self.rng = random.Random(self.seed)
        self.calendar: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.tie = itertools.count()
        self.numbers = itertools.count()
        self.verifying: list[Job] = []
        self.drafting: list[Job] = []
        self.target_busy = self.draft_busy = False
        self.target_reads = 0.0, 0.0, 0
        """When its pass began, when it ends, and its rows of prompts."""
        self.coordinator_free = 0.0

    def after(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.calendar, (self.now + seconds, next(self.tie), call, args))

    def run(self, seconds: float) -> float:
        """Tokens per second from a cold start."""
        for _ in range(self.concurrency):
            self.start()
        self.resume(seconds)
        return self.made / self.now

    def resume(self, until: float) -> None:
        """Go on up to this time."""
        while self.calendar and self.now < until:
            self.now, _, call, args = heapq.heappop(self.calendar)
            call(*args)

    def start(self) -> None:
        number = next(self.numbers)
        length = self.prompt
        # Lengths differ, so that sequences do not march in step.
        tokens = self.rng.randint(self.tokens // 2, 3 * self.tokens // 2)
        self.begin(Job(self.make(self.controller), self.acceptance(number, self.now), tokens, length))

    def begin(self, job: Job) -> None:
        k = 0 if job.first else self.choose(job)
        job.proposal = self.drafted_by(job, k)
        self.drafted += job.proposal.num_draft_tokens
        if k == 0:
            self.verify(job)
            self.plan(job)
            return
        job.lacking = job.unread = job.length - job.drafted_to
        job.policy.on_draft_request(job.lacking)
        job.drafted_to = job.length
        job.sent_at, job.steps_left, job.prefill = self.now, job.proposal.depth, 0.0
        self.hop(self.draft_arrives, job)

    def drafted_by(self, job: Job, k: int) -> Proposal:
        """What the draft is going to answer."""
        shape = job.policy.shape(k) if k else CHAIN
        if shape.is_chain:
            return chain(k)
        return tree(job.acceptance(job.generated), self.ranks, k, shape)

    def choose(self, job: Job, more: int = 0) -> int:
        """K of the round after `more` tokens."""
        planned, job.planned = job.planned, None
        if planned is not None:
            return min(planned, job.remaining - 1)
        lacking = job.length - job.drafted_to
        return job.policy.choose(min(MAX_K, job.remaining - more - 1), lacking, job.remaining)

    def plan(self, job: Job) -> None:
        """Choose the round after a plain one; where that is plain as well the target is told."""
        if job.first or job.remaining < 2:
            return
        job.planned = self.choose(job, more=1)
        if job.planned == 0:
            self.hop(self.told, job, job.number)

    def told(self, job: Job, number: int) -> None:
        if job.answered < number:
            job.plain_after = number

    def hop(self, call: Callable[..., None], *args: object) -> None:
        """Through the coordinator's event loop, then over the wire."""
        self.coordinator_free = max(self.coordinator_free, self.now) + self.machine.message
        self.after(self.coordinator_free - self.now + self.machine.wire, call, *args)

    def noisy(self, seconds: float, other_busy: bool) -> float:
        slower = self.machine.contention if other_busy else 1.0
        return seconds * slower * self.rng.lognormvariate(0, self.machine.noise)

    def draft_arrives(self, job: Job) -> None:
        self.drafting.append(job)
        if not self.draft_busy:
            self.draft_pass()

    def draft_pass(self) -> None:
        m, batch = self.machine, list(self.drafting)
        if not batch:
            return
        unread = [max(job.unread - MAX_K - 1, 0) for job in batch]
        rows = sum(TREE_ROWS if job.proposal.is_tree else 1 for job in batch)
        seconds = m.draft_step + m.draft_sequence * rows + m.draft_token * sum(unread)
        taken = self.noisy(seconds, self.target_busy)
        for job, own in zip(batch, unread, strict=True):
            job.unread = 0
            job.prefill += taken * own / (sum(unread) + len(batch))
        self.draft_busy = True
        self.after(taken, self.draft_done, batch)

    def draft_done(self, batch: list[Job]) -> None:
        self.draft_busy = False
        for job in batch:
            job.steps_left -= 1
            if job.steps_left == 0:
                self.drafting.remove(job)
                self.hop(self.proposal, job)
        self.draft_pass()

    def proposal(self, job: Job) -> None:
        job.policy.on_proposal(job.proposal, self.now - job.sent_at, job.lacking, job.prefill)
        self.verify(job)

    def verify(self, job: Job) -> None:
        self.waits(job)
        self.hop(self.target_arrives, job)

    def waits(self, job: Job) -> None:
        job.policy.on_verify(job.proposal, prefills=job.first)
        job.sent_at, job.number = self.now, job.number + 1

    def target_arrives(self, job: Job) -> None:
        self.verifying.append(job)
        begun, ends, prefill = self.target_reads
        job.prefill_before = round(prefill * max(0.0, ends - self.now) / (ends - begun)) if prefill else 0
        if not self.target_busy:
            # What arrives in the same moment shares the pass.
            self.target_busy = True
            self.after(0.0, self.target_pass)

    def target_pass(self) -> None:
        m, batch = self.machine, self.verifying
        self.verifying = []
        self.target_busy = bool(batch)
        if not batch:
            return
        prefill = sum(job.length - 1 for job in batch if job.first)
        rows = prefill + sum(job.proposal.num_draft_tokens + 1 for job in batch)
        seconds = m.target_step + m.target_sequence * len(batch) + m.target_row * rows
        seconds = self.noisy(seconds, self.draft_busy)
        self.target_reads = self.now, self.now + seconds, prefill
        self.after(seconds, self.target_done, batch, rows, prefill)

    def target_done(self, batch: list[Job], rows: int, prefill: int) -> None:
        for job in batch:
            job.answered += 1
            went_on = job.plain_after == job.answered
            if went_on:
                self.verifying.append(job)
            self.hop(self.verdict, job, rows, prefill, len(batch), went_on)
        self.target_pass()

    def verdict(self, job: Job, rows: int, prefill: int, sequences: int, went_on: bool) -> None:
        judged = self.judged(job.proposal, job.acceptance(job.generated))
        waited, job.prefill_before = prefill + job.prefill_before, 0
        timing = None if job.first else Verification(self.now - job.sent_at, waited)
        job.policy.on_verdict(job.proposal, judged, timing)
        job.first = False
        made = min(judged.num_accepted + 1, job.remaining)
        self.made += made
        job.generated += made
        job.length += made
        job.remaining -= made
        if went_on:
            job.planned = None
            self.waits(job)
            self.plan(job)
        elif job.remaining:
            self.begin(job)
        else:
            job.policy.on_suspend()
            self.start()

    def judged(self, proposal: Proposal, rate: float) -> Verdict:
        if not proposal.is_tree:
            accepted = 0
            while accepted < proposal.num_draft_tokens and self.rng.random() < rate:
                accepted += 1
            return accepting(accepted)
        after, path, at = children(proposal), list[int](), -1
        while at in after and (rank := self.rank(rate)) < len(after[at]):
            at = after[at][rank]
            path.append(at)
        return following(tuple(path))

    def rank(self, rate: float) -> int:
        """Of the target's token among the draft's."""
        left = self.rng.random()
        for rank, share in enumerate((rate, *((1 - rate) * share for share in self.ranks))):
            left -= share
            if left < 0:
                return rank
        return len(self.ranks) + 1
