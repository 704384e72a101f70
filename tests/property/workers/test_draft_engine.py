"""The draft engine against plain lists: random rounds, accepted counts, gaps, evictions, reopenings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from paceline.core.clock import ManualClock
from paceline.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, StaleEpochError
from paceline.core.messages import CloseSequence, DraftProposal, DraftRound, OpenSequence, SequenceFailed
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.multi_step import ChainSkills
from tests.sim.caches import CacheChecker
from tests.sim.reference import check_slow_proposal
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine

VOCAB = 6
EOS = (5,)
MODEL = ToyModel(VOCAB, seed=4)
CONFIG = draft_config(support_mass=0.9)
SETTINGS = settings(
    max_examples=35,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
tokens = st.integers(0, VOCAB - 1)


@dataclass
class Sequence:
    """What the coordinator would know."""

    name: str
    params: SequenceParams
    ledger: list[int]
    known: int
    epoch: int = 1
    round: int = 0
    last: tuple[DraftRound, DraftProposal] | None = None


@st.composite
def params(draw: st.DrawFn) -> SequenceParams:
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.6, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=100,
        min_tokens=draw(st.sampled_from([0, 0, 8])),
        stop_token_ids=draw(st.sampled_from([(), (2,)])),
    )
    salt = draw(st.sampled_from(["", "a"]))
    return SequenceParams(sampling, draw(st.sampled_from(AcceptanceMode)), 1, cache_salt=salt)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Of four tokens and more, two in three begin with the same ones as many others."""
    same = draw(st.sampled_from([0, 9, 25]))
    return [*([1, 2, 3, 4, 5] * 5)[:same], *draw(st.lists(tokens, min_size=1, max_size=60 - same))]


class DraftEngineMachine(RuleBasedStateMachine):
    """Up to four sequences on one draft engine."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = ToyRunner(MODEL, num_blocks=200, block_size=4)
        self.it = draft_engine(
            self.runner,
            CONFIG,
            vocabulary_size=VOCAB,
            max_model_len=300,
            eos_token_ids=EOS,
            clock=ManualClock(),
        )
        self.caches = CacheChecker()
        self.sequences: list[Sequence] = []
        self.count = 0

    def send(self, command: Any) -> list[Any]:
        return list(self.it.handle(command, 0.0))

    def refused(self, command: Any, error: type[Exception]) -> Any:
        (event,) = self.send(command)
        assert isinstance(event, SequenceFailed)
        assert isinstance(event.error, error), event.error
        return event.error

    def reopen(self, of: Sequence) -> None:
        of.epoch += 1
        assert self.send(OpenSequence(of.name, of.epoch, tuple(of.ledger), of.params)) == []
        of.known, of.last = len(of.ledger), None

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
        assert held is not None
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

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(of=params(), prompt=prompts())
    def open_one(self, of: SequenceParams, prompt: list[int]) -> None:
        self.count += 1
        one = Sequence(f"s{self.count}", of, list(prompt), len(prompt), epoch=0)
        self.sequences.append(one)
        self.reopen(one)

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

    @invariant()
    def blocks_are_whole(self) -> None:
        self.caches.check(self.runner, self.it.sequences)

    def teardown(self) -> None:
        for of in self.sequences:
            self.send(CloseSequence(of.name, of.epoch))
        assert self.runner.pool.used_blocks == 0


def test_the_draft_cache_lacks_only_the_last_draft_token() -> None:
    run_machine(DraftEngineMachine, settings=SETTINGS)


class ChainingMachine(DraftEngineMachine):
    """On a model that draws what nobody has to look at by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.runner.chain_skills = ChainSkills(supports=True, max_feed=16)


def test_chains_keep_the_same_cache_invariant() -> None:
    run_machine(ChainingMachine, settings=SETTINGS)
