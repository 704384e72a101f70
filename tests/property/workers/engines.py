"""What the machines of the draft and the target engine share: sequences, prompts, refusals, whole caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.messages import CloseSequence, OpenSequence, SequenceFailed
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from tests.sim.caches import CacheChecker
from tests.sim.toys import ToyModel, ToyRunner

VOCAB = 6
EOS = (5,)
tokens = st.integers(0, VOCAB - 1)


@dataclass
class Sequence:
    """What the coordinator would know."""

    name: str
    params: SequenceParams
    ledger: list[int]
    known: int
    epoch: int = 0
    round: int = 0
    last: tuple[Any, Any] | None = None
    """The last round's command, and what was answered."""
    dropped: bool = False


@st.composite
def params(draw: st.DrawFn, *, ignores_eos: bool) -> SequenceParams:
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.6, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=100,
        min_tokens=draw(st.sampled_from([0, 0, 8])),
        stop_token_ids=draw(st.sampled_from([(), (2,)])),
        ignore_eos=ignores_eos and draw(st.booleans()),
    )
    salt = draw(st.sampled_from(["", "a"]))
    return SequenceParams(sampling, draw(st.sampled_from(AcceptanceMode)), 1, cache_salt=salt)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Of four tokens and more, two in three begin with the same ones as many others."""
    same = draw(st.sampled_from([0, 9, 25]))
    return [*([1, 2, 3, 4, 5] * 5)[:same], *draw(st.lists(tokens, min_size=1, max_size=60 - same))]


class EngineMachine(RuleBasedStateMachine):
    """Up to four sequences on one engine, which `engine` makes."""

    model: ToyModel
    ignores_eos = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = ToyRunner(self.model, num_blocks=200, block_size=4)
        self.it = self.engine()
        self.caches = CacheChecker()
        self.sequences: list[Sequence] = []
        self.count = 0

    def engine(self) -> Any:
        raise NotImplementedError

    def send(self, command: Any) -> list[Any]:
        return list(self.it.handle(command, 0.0))

    def refused(self, command: Any, error: type[Exception]) -> Any:
        (event,) = self.send(command)
        assert isinstance(event, SequenceFailed)
        assert isinstance(event.error, error), event.error
        assert (event.sequence_id, event.epoch) == (command.sequence_id, command.epoch)
        return event.error

    def reopen(self, of: Sequence) -> None:
        of.epoch += 1
        assert self.send(OpenSequence(of.name, of.epoch, tuple(of.ledger), of.params)) == []
        of.known, of.dropped, of.last = len(of.ledger), False, None

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data(), prompt=prompts())
    def open_one(self, data: st.DataObject, prompt: list[int]) -> None:
        self.count += 1
        of = data.draw(params(ignores_eos=self.ignores_eos))
        self.sequences.append(Sequence(f"s{self.count}", of, list(prompt), len(prompt)))
        self.reopen(self.sequences[-1])

    @invariant()
    def blocks_are_whole(self) -> None:
        self.caches.check(self.runner, self.it.sequences)

    def teardown(self) -> None:
        for of in self.sequences:
            self.send(CloseSequence(of.name, of.epoch))
        assert self.runner.pool.used_blocks == 0
        assert self.runner.pool.free_blocks == self.runner.pool.num_blocks
