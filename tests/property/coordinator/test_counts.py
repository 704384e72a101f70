"""Counts of a sequence are of its committed tokens, for any verdict and any end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.sequence.ledger import Commit
from coordinator.sequence.messages import Action, DraftReady, Emit, Phase, Signal, ToDraft
from coordinator.telemetry.metrics import Metrics
from paceline.core.messages import DraftRound, RoundVerdict
from paceline.core.types import TokenOrigin, Verdict
from tests.sim.reference import letter
from tests.unit.coordinator.test_round import Driver

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
LETTERS = 6
"""Tokens that rounds draw: few, so that proposals, stops and verdicts often agree."""

stops = st.text([letter(i) for i in range(LETTERS)], min_size=1, max_size=2)
samplings = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 20),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.lists(st.integers(0, LETTERS - 1), max_size=1).map(tuple),
        "stop": st.lists(stops, max_size=1).map(tuple),
    }
)


class Counted:
    """A sequence whose rounds are told to the metrics, and counted slowly beside it."""

    def __init__(self, data: st.DataObject, k: int, sampling: dict[str, Any]) -> None:
        self.data = data
        self.it = Driver(k=k, **sampling)
        self.metrics = Metrics()
        self.running: Any = SimpleNamespace(
            machine=self.it.machine, state=self.it.state, arrived_at=0.0, last_token_at=None
        )
        self.rounds: list[tuple[int, Commit]] = []
        """Of each: draft tokens that were verified, and what was committed."""
        self.asked = 0
        self.proposal: tuple[int, ...] = ()

    def take(self, actions: list[Action]) -> None:
        """As the dispatcher does."""
        for action in actions:
            if isinstance(action, Emit):
                self.rounds.append((len(self.proposal), action.commit))
                self.proposal = ()
            if isinstance(action, ToDraft) and isinstance(action.command, DraftRound):
                self.asked = action.command.num_draft_tokens
        record, self.it.state.committed = self.it.state.committed, None
        if record is not None:
            self.metrics.round_ended(self.running, record, 0.0)
            self.running.last_token_at = 0.0

    def draw(self, smallest: int, most: int) -> int:
        return self.data.draw(st.integers(smallest, most))

    def step(self) -> None:
        """A proposal, or a verdict on one: any of those that fit."""
        if self.it.phase is Phase.DRAFTING:
            self.proposal = tuple(self.draw(0, LETTERS - 1) for _ in range(self.draw(0, self.asked)))
            self.take(self.it.propose(*self.proposal))
            return
        accepted = self.draw(0, len(self.proposal))
        token_ids = (*self.proposal[:accepted], self.draw(0, LETTERS - 1))
        verdict = Verdict(accepted, token_ids, self.it.length + accepted)
        self.take(self.it(RoundVerdict("s", 1, self.it.state.round, verdict)))


@SETTINGS
@given(st.data(), st.integers(0, 5), samplings)
def test_every_count_is_of_committed_tokens(data: st.DataObject, k: int, sampling: dict[str, Any]) -> None:
    of = Counted(data, k, sampling)
    of.take(of.it(DraftReady()))
    of.take(of.it(Signal.TARGET_READY))
    stays = of.draw(1, 12)
    while of.it.phase is not Phase.DONE and len(of.rounds) < stays:
        of.step()
    of.take(of.it(Signal.CANCEL))
    stats, metrics, generated = (of.it.state.stats, of.metrics, of.it.state.ledger.num_generated)

    origins = [commit.origins for _, commit in of.rounds]
    accepted = [each.count(TokenOrigin.ACCEPTED) for each in origins]
    ends_accepted = sum(each[-1] is TokenOrigin.ACCEPTED for each in origins)
    assert generated == sum(len(each) for each in origins)
    assert generated == stats.num_rounds + stats.num_accepted_draft_tokens - ends_accepted
    assert stats.num_accepted_draft_tokens == sum(accepted)

    drafted = [(k, len(commit.token_ids), a) for (k, commit), a in zip(of.rounds, accepted, strict=True) if k]
    assert (stats.num_rounds, stats.num_spec_steps) == (len(of.rounds), len(drafted))
    assert stats.num_draft_tokens == sum(k for k, _, _ in drafted)
    length = sum(tokens for _, tokens, _ in drafted) / len(drafted) if drafted else 1.0
    assert stats.mean_acceptance_length == length
    assert sum(i * count for i, count in enumerate(stats.histogram)) == sum(accepted)
    assert sum(stats.histogram) == len(drafted)
    assert sum(stats.accepted_at) == sum(accepted)
    # What was neither accepted nor replaced by a correction was not judged.
    assert sum(stats.reached) == sum(accepted) + sum(each.count(TokenOrigin.CORRECTION) for each in origins)

    assert metrics.generation_tokens == generated
    assert (metrics.rounds, metrics.num_drafts) == (len(of.rounds), len(drafted))
    assert metrics.num_draft_tokens == stats.num_draft_tokens
    assert metrics.num_accepted_tokens == sum(metrics.accepted_at) == sum(accepted)
