"""The target engine against plain lists: random rounds, repeats, gaps, lost verdicts, evictions, reopenings.

The toy model reads its prefix back from the cache, so a wrong rollback gives wrong verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from paceline.core.clock import ManualClock
from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, StaleEpochError
from paceline.core.messages import CloseSequence, OpenSequence, RoundVerdict, VerifyRound
from paceline.core.types import AcceptanceMode, Outcome, Proposal, SparseDistribution
from paceline.decoding.sampling import to_sparse, truncate_support
from target_worker.engine import TargetEngine
from tests.property.machines import machine_settings
from tests.property.workers.engines import EOS, VOCAB, EngineMachine, Sequence, tokens
from tests.sim.reference import masked_probabilities, slow_tree_verdict, slow_verdict
from tests.sim.toys import ToyModel, own_choice, target_config

MODEL = ToyModel(VOCAB, seed=3)
DRAFT = MODEL.near(0.7)
SETTINGS = machine_settings(40, 25)


@dataclass
class Asked:
    """A round under way."""

    sequence: Sequence
    command: VerifyRound
    want: Outcome = field(init=False)

    def __post_init__(self) -> None:
        asked = MODEL, self.sequence.ledger, self.sequence.params, self.command.proposal, EOS
        if self.command.proposal.is_tree:
            path, token = slow_tree_verdict(*asked)
            self.want = Outcome(len(path), token, path[-1] if path else None)
        else:
            self.want = Outcome(*slow_verdict(*asked))


@st.composite
def trees(draw: st.DrawFn, of: Sequence) -> Proposal:
    """A tree of likely and other tokens; where tokens are drawn, of several tries a node with any q."""
    parents: list[int] = []
    token_ids: list[int] = []
    tries: list[int] = []
    sent: list[SparseDistribution] = []
    prefixes = {-1: of.ledger}
    for _ in range(draw(st.integers(1, 9))):
        parent = draw(st.integers(-1, len(token_ids) - 1))
        prefix = prefixes[parent]
        token = draw(tokens)
        if draw(st.integers(0, 2)):
            token = own_choice(MODEL, prefix, of.params.sampling, of.params.prompt_length, EOS)
        siblings = [n for n, other in enumerate(parents) if other == parent and token_ids[n] == token]
        if not siblings:
            siblings = [len(token_ids)]
            prefixes[len(token_ids)] = [*prefix, token]
            parents.append(parent)
            token_ids.append(token)
        tries.append(siblings[0])
        weights = np.array([draw(st.integers(0, 3)) for _ in range(VOCAB)])
        weights[token] += 1
        ids, probabilities, lengths, _ = truncate_support(
            torch.from_numpy(weights / weights.sum())[None], 1, 9
        )
        sent += to_sparse(ids, probabilities, lengths)
    if of.params.target_decides:
        return Proposal(tuple(token_ids), tuple(parents))
    with_q = draw(st.booleans())
    return Proposal(tuple(token_ids), tuple(parents), tuple(sent) if with_q else (), tuple(tries))


class TargetMachine(EngineMachine):
    """Up to four sequences on one target engine."""

    model = MODEL
    ignores_eos = True

    def engine(self) -> Any:
        lengths = {"vocabulary_size": VOCAB, "max_model_len": 200}
        return TargetEngine(self.runner, target_config(), **lengths, eos_token_ids=EOS, clock=ManualClock())

    def pick(self, data: st.DataObject) -> Sequence:
        it: Sequence = data.draw(st.sampled_from(self.sequences))
        if it.dropped:
            self.reopen(it)
        return it

    def command(self, data: st.DataObject, of: Sequence, tail: int | None = None) -> VerifyRound:
        """The next round, with a chain whose first tokens are likely ones."""
        of.round += 1
        base = len(of.ledger)
        if tail is None:
            tail = data.draw(st.integers(base - of.known, base), label="tail")
        committed = tuple(of.ledger[base - tail :] if tail else ())
        if of.params.judged_as.facts.takes_trees and data.draw(st.booleans(), label="a tree"):
            tree = data.draw(trees(of), label="tree")
            return VerifyRound(of.name, of.epoch, of.round, base, committed, tree)
        right = data.draw(st.integers(0, 4), label="right")
        chain: list[int] = []
        for _ in range(right):
            prefix = [*of.ledger, *chain]
            chain.append(own_choice(MODEL, prefix, of.params.sampling, of.params.prompt_length, EOS))
        chain += data.draw(st.lists(tokens, max_size=3), label="guesses")
        proposal = Proposal(tuple(chain))
        ratio = of.params.mode is not AcceptanceMode.COUPLED and not of.params.sampling.greedy
        if ratio and chain and data.draw(st.booleans(), label="with q"):
            q = [
                masked_probabilities(DRAFT, [*of.ledger, *chain[:i]], of.params, EOS)
                for i in range(len(chain))
            ]
            # Every token drawn must have a positive probability.
            rows = torch.from_numpy(np.array(q) * 0.99 + 0.01 / VOCAB)
            ids, probabilities, lengths, _ = truncate_support(rows, 1.0)
            proposal = Proposal(tuple(chain), distributions=tuple(to_sparse(ids, probabilities, lengths)))
        return VerifyRound(of.name, of.epoch, of.round, base, committed, proposal)

    def finish(self, asked: list[Asked], *, commit: bool = True) -> None:
        """Step until all are answered; check every verdict and the cache behind it."""
        waiting = {one.sequence.name: one for one in asked}
        while waiting:
            assert self.it.has_work
            for event in self.it.step():
                assert isinstance(event, RoundVerdict), event
                self.check(waiting.pop(event.sequence_id), event, commit=commit)
        assert not self.it.has_work

    def check(self, one: Asked, event: RoundVerdict, *, commit: bool) -> None:
        of, command, verdict = one.sequence, one.command, event.verdict
        assert (event.epoch, event.round) == (command.epoch, command.round)
        assert verdict.outcome == one.want
        assert verdict.token_ids == (*command.proposal.accepted(one.want), one.want.next_token)
        after = [*of.ledger, *verdict.token_ids]
        held = self.it.sequences.find(of.name)
        assert verdict.num_computed_tokens == held.table.length == len(after) - 1
        assert self.runner.read(held.table) == after[:-1] == held.session.cached
        of.known = len(after)
        if commit:
            of.ledger = after
            of.last = (command, verdict)
        else:
            # Never committed: the worker is ahead of the ledger.
            of.known, of.last = len(of.ledger), None

    # ---- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), commit=st.sampled_from([True, True, True, False]))
    def rounds(self, data: st.DataObject, commit: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.sequences), min_size=1, unique_by=lambda s: s.name))
        asked = []
        for of in chosen:
            if of.dropped:
                self.reopen(of)
            one = Asked(of, self.command(data, of))
            assert self.send(one.command) == []
            assert self.send(replace(one.command, committed_tail=())) == [], "in progress"
            asked.append(one)
        self.finish(asked, commit=commit)

    @precondition(lambda self: any(s.last and not s.dropped for s in self.sequences))
    @rule(data=st.data())
    def repeat_a_round(self, data: st.DataObject) -> None:
        of = data.draw(st.sampled_from([s for s in self.sequences if s.last and not s.dropped]))
        command, verdict = of.last
        passes = len(self.runner.passes)
        assert self.send(command) == [RoundVerdict(of.name, of.epoch, of.round, verdict)]
        assert len(self.runner.passes) == passes
        other = replace(command, proposal=Proposal((*command.proposal.token_ids, 0)))
        self.refused(other, InvalidArgumentError)
        if of.round > 1:
            self.refused(replace(command, round=of.round - 1), StaleEpochError)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), elsewhere=st.lists(tokens, min_size=1, max_size=5))
    def gap(self, data: st.DataObject, elsewhere: list[int]) -> None:
        of = self.pick(data)
        held = self.it.sequences.find(of.name)
        of.ledger += elsewhere
        worker_has = len(held.session.tokens)
        if worker_has > of.known:
            of.ledger += elsewhere * 10
        if len(of.ledger) <= worker_has + 1:
            self.reopen(of)
            return
        command = self.command(data, of, tail=len(of.ledger) - worker_has - 1)
        error = self.refused(command, FailedPreconditionError)
        assert error.known_length == worker_has
        again = replace(command, committed_tail=tuple(of.ledger[of.known :]))
        assert self.send(again) == []
        self.finish([Asked(of, again)])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fenced_off(self, data: st.DataObject) -> None:
        of = self.pick(data)
        command = self.command(data, of)
        of.round -= 1
        self.refused(replace(command, epoch=of.epoch - 1), StaleEpochError)
        self.refused(OpenSequence(of.name, of.epoch - 1, (1,), of.params), StaleEpochError)
        assert self.send(CloseSequence(of.name, of.epoch - 1)) == []
        assert self.it.holds(of.name)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def reopen_while_a_round_is_under_way(self, data: st.DataObject) -> None:
        of = self.pick(data)
        assert self.send(self.command(data, of)) == []
        if data.draw(st.booleans()):
            self.it.step()
        self.reopen(of)
        assert not self.it.has_work
        one = Asked(of, self.command(data, of))
        assert self.send(one.command) == []
        self.finish([one])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def overtake_a_round_under_way(self, data: st.DataObject) -> None:
        of = self.pick(data)
        assert self.send(self.command(data, of)) == []
        one = Asked(of, self.command(data, of))
        assert self.send(one.command) == []
        self.finish([one])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        of = self.pick(data)
        self.it.drop(of.name)
        self.refused(self.command(data, of), NotFoundError)
        of.dropped = True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        of = self.pick(data)
        if data.draw(st.booleans()):
            self.send(self.command(data, of))
        assert self.send(CloseSequence(of.name, of.epoch)) == []
        assert not self.it.holds(of.name)
        assert not self.it.has_work
        self.sequences.remove(of)


def test_the_target_cache_lacks_only_the_last_token() -> None:
    run_machine(TargetMachine, settings=SETTINGS)
