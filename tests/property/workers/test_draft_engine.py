"""The draft engine against plain lists: random rounds, accepted counts, gaps, evictions, reopenings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from paceline.core.clock import ManualClock
from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, StaleEpochError
from paceline.core.messages import CloseSequence, DraftProposal, DraftRound
from paceline.engine.multi_step import ChainSkills
from tests.property.machines import machine_settings
from tests.property.workers.engines import EOS, VOCAB, EngineMachine, Sequence, tokens
from tests.sim.reference import check_slow_proposal
from tests.sim.toys import ToyModel, draft_config, draft_engine

MODEL = ToyModel(VOCAB, seed=4)
CONFIG = draft_config(support_mass=0.9)
SETTINGS = machine_settings(35, 25)


class DraftEngineMachine(EngineMachine):
    """Up to four sequences on one draft engine."""

    model = MODEL
    sub_drafter = "none"

    def engine(self) -> Any:
        lengths = {"vocabulary_size": VOCAB, "max_model_len": 300}
        config = replace(CONFIG, sub_drafter=self.sub_drafter)
        return draft_engine(self.runner, config, **lengths, eos_token_ids=EOS, clock=ManualClock())

    def command(self, of: Sequence, k: int, tail: int | None = None) -> DraftRound:
        of.round += 1
        base = len(of.ledger)
        missing = base - of.known if tail is None else tail
        return DraftRound(of.name, of.epoch, of.round, base, tuple(of.ledger[base - missing :]), k)

    def finish(self, asked: dict[str, tuple[Sequence, DraftRound]]) -> None:
        waiting = dict(asked)
        while waiting:
            assert self.it.has_work
            for event in self.it.step():
                assert isinstance(event, DraftProposal), event
                self.check(*waiting.pop(event.sequence_id), event)
        assert not self.it.has_work

    def check(self, of: Sequence, command: DraftRound, event: DraftProposal) -> None:
        k, proposal = command.num_draft_tokens, event.proposal
        assert (event.epoch, event.round, event.base_length) == (of.epoch, of.round, len(of.ledger))
        assert proposal.num_draft_tokens == k
        held = self.it.sequences.find(of.name)
        assert held.table.length == event.num_computed_tokens == len(of.ledger) + k - 1
        assert self.runner.read(held.table) == [*of.ledger, *proposal.token_ids[:-1]]
        check_slow_proposal(MODEL, of.ledger, of.params, proposal, CONFIG.support_mass, EOS)
        of.known, of.last = len(of.ledger), (command, event)

    def judge(self, of: Sequence, accepted: int, token: int) -> None:
        """The ledger grows as if the target had accepted so many."""
        if of.last is not None:
            chain = of.last[1].proposal.token_ids
            of.ledger += [*chain[: min(accepted, len(chain))], token]
            of.last = None

    # ---- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), accepted=st.lists(st.integers(0, 6), min_size=4, max_size=4), token=tokens)
    def rounds(self, data: st.DataObject, accepted: list[int], token: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.sequences), min_size=1, unique_by=lambda s: s.name))
        asked = {}
        for of, taken in zip(chosen, accepted, strict=False):
            self.judge(of, taken, token)
            command = self.command(of, data.draw(st.integers(1, 6), label="k"))
            assert self.send(command) == []
            assert self.send(command) == [], "in progress"
            asked[of.name] = (of, command)
        self.finish(asked)

    @precondition(lambda self: any(s.last for s in self.sequences))
    @rule(data=st.data())
    def repeat_a_round(self, data: st.DataObject) -> None:
        of = data.draw(st.sampled_from([s for s in self.sequences if s.last]))
        command, answer = of.last
        passes = len(self.runner.passes)
        assert self.send(command) == [answer]
        assert len(self.runner.passes) == passes
        self.refused(replace(command, num_draft_tokens=command.num_draft_tokens + 1), InvalidArgumentError)
        if of.round > 1:
            self.refused(replace(command, round=of.round - 1), StaleEpochError)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), elsewhere=st.lists(tokens, min_size=2, max_size=5))
    def gap(self, data: st.DataObject, elsewhere: list[int]) -> None:
        of = data.draw(st.sampled_from(self.sequences))
        of.ledger += elsewhere
        command = self.command(of, 2, tail=len(of.ledger) - of.known - 1)
        assert self.refused(command, FailedPreconditionError).known_length == of.known
        again = replace(command, committed_tail=tuple(of.ledger[of.known :]))
        assert self.send(again) == []
        self.finish({of.name: (of, again)})

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), steps=st.integers(0, 3))
    def the_coordinator_goes_on_without_a_slow_proposal(self, data: st.DataObject, steps: int) -> None:
        of = data.draw(st.sampled_from(self.sequences))
        slow = self.command(of, 6)
        assert self.send(slow) == []
        of.known = len(of.ledger)
        for _ in range(steps):
            if self.it.step():
                break
        of.ledger += [0, 1]
        of.last = None
        command = self.command(of, 3)
        assert self.send(command) == []
        self.finish({of.name: (of, command)})

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), under_way=st.booleans())
    def evict_and_reopen(self, data: st.DataObject, under_way: bool) -> None:
        of = data.draw(st.sampled_from(self.sequences))
        if under_way:
            self.send(self.command(of, 3))
        self.it.drop(of.name)
        self.refused(self.command(of, 2), NotFoundError)
        self.reopen(of)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), under_way=st.booleans())
    def reopen_and_fence_off(self, data: st.DataObject, under_way: bool) -> None:
        of = data.draw(st.sampled_from(self.sequences))
        if under_way:
            self.send(self.command(of, 3))
        self.reopen(of)
        assert not self.it.has_work
        command = self.command(of, 2)
        of.round -= 1
        self.refused(replace(command, epoch=of.epoch - 1), StaleEpochError)
        assert self.send(CloseSequence(of.name, of.epoch - 1)) == []
        assert self.it.holds(of.name)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), under_way=st.booleans())
    def close(self, data: st.DataObject, under_way: bool) -> None:
        of = data.draw(st.sampled_from(self.sequences))
        if under_way:
            self.send(self.command(of, 3))
        assert self.send(CloseSequence(of.name, of.epoch)) == []
        assert not self.it.has_work
        self.sequences.remove(of)


def test_the_draft_cache_lacks_only_the_last_draft_token() -> None:
    run_machine(DraftEngineMachine, settings=SETTINGS)


class ChainingMachine(DraftEngineMachine):
    """On a model that draws what nobody has to look at by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.runner.chain_skills = ChainSkills(max_feed=16)


def test_chains_keep_the_same_cache_invariant() -> None:
    run_machine(ChainingMachine, settings=SETTINGS)


class GuessingMachine(DraftEngineMachine):
    """Its draft checks what a sub-drafter guesses, and draws the same tokens."""

    sub_drafter = "ngram"


class GuessingChainsMachine(ChainingMachine):
    """Draws chains where there is no guess."""

    sub_drafter = "prompt-lookup"


@pytest.mark.parametrize("machine", [GuessingMachine, GuessingChainsMachine])
def test_a_sub_drafter_changes_no_token(machine: type[DraftEngineMachine]) -> None:
    run_machine(machine, settings=SETTINGS)
