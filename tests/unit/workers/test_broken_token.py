"""A model that breaks on one token: entries computed beside it are not used afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError
from paceline.core.messages import CloseSequence, DraftRound, OpenSequence, SequenceFailed, VerifyRound
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import make_runner, random_model
from paceline.engine.runner import ModelRunner
from paceline.engine.scheduling.sequences import HeldSequence
from target_worker.engine import TargetEngine
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, own_choice, target_config

VOCAB = 7
POISON = VOCAB - 1
MODEL = ToyModel(VOCAB, seed=3)
MODEL.table[:, POISON] = -30.0  # it never comes by itself
PROMPT = tuple(i % POISON for i in range(11))
BLOCK = 4
BROKEN = -1
"""What an entry holds that is no numbers."""


class BreakingRunner(ToyRunner):
    """Attends as matrices do: of a pass with the token, no row and no entry of its sequence is numbers."""

    def __init__(self, model: ToyModel = MODEL, num_blocks: int = 50, poison: int = POISON) -> None:
        super().__init__(model, num_blocks, BLOCK)
        self.spoil = lambda prefix: BROKEN in prefix
        self.poison = poison

    def forward(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        begun = [item.table.length for item in inputs]
        logits, row = super().forward(inputs), 0
        for item, start in zip(inputs, begun, strict=True):
            if self.poison in item.token_ids:
                logits[row : row + item.num_logits] = torch.nan
                self.memory |= dict.fromkeys(item.table.slots(start, item.table.length), BROKEN)
            row += item.num_logits
        return logits


def best(n: int, ledger: Sequence[int]) -> tuple[int, ...]:
    """The next n tokens of greedy decoding with the toy."""
    tokens = list(ledger)
    for _ in range(n):
        tokens.append(own_choice(MODEL, tokens, SamplingParams(temperature=0, seed=1), len(ledger)))
    return tuple(tokens[len(ledger) :])


class Worker:
    """Either one, and short words for what is asked of it."""

    def __init__(self, it: Any) -> None:
        self.it = it

    def open(self, name: str, tokens: Sequence[int], **sampling: Any) -> None:
        of = SamplingParams(temperature=0, seed=1, **sampling)
        params = SequenceParams(of, AcceptanceMode.COUPLED, len(tokens))
        assert not self.it.handle(OpenSequence(name, 1, tuple(tokens), params), 0.0)

    def answer(self, command: VerifyRound | DraftRound) -> Any:
        """The last thing it says."""
        events = list(self.it.handle(command, 0.0))
        while self.it.has_work:
            events += self.it.step()
        return events[-1]

    def held(self, name: str) -> HeldSequence[Any]:
        held: HeldSequence[Any] | None = self.it.sequences.find(name)
        assert held is not None
        assert held.state.finite_length <= held.table.length
        return held

    def close(self, name: str) -> None:
        self.it.handle(CloseSequence(name, 1), 0.0)


def verify(name: str, base: int, proposed: Sequence[int] = (), number: int = 1) -> VerifyRound:
    return VerifyRound(name, 1, number, base, (), Proposal(tuple(proposed)))


def check_broken(event: Any) -> None:
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, InternalError)
    assert "not numbers" in event.error.message


def target() -> Worker:
    return Worker(TargetEngine(BreakingRunner(), target_config(), vocabulary_size=VOCAB, max_model_len=60))


def draft(branches: int) -> Worker:
    config = draft_config(support_mass=0.9, lookahead_branches=branches, lookahead_sequences=1)
    runner, clock = BreakingRunner(), ManualClock()
    return Worker(draft_engine(runner, config, vocabulary_size=VOCAB, max_model_len=60, clock=clock))


# ---- a model of matrices --------------------------------------------------------------------------


NUMBERS, BREAKS_IT = 97, 50
TEXT = [(7 * i) % 47 for i in range(40)]


@pytest.fixture
def real() -> ModelRunner:
    config = LlamaConfig(
        vocab_size=NUMBERS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = random_model(config, seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[BREAKS_IT] = torch.nan
    return make_runner(model, num_blocks=32, block_size=16)


@pytest.mark.parametrize("who", ["itself", "another"])
def test_a_breaking_draft_token_leaves_the_ledger_intact(real: ModelRunner, who: str) -> None:
    """Neither the ledger's entries nor the prefix cache hold NaN afterwards."""
    table = real.new_table()
    right = int(real.forward([SequenceInput(table, TEXT, 1)])[0].argmax())
    table.free()
    config = target_config(max_batch_tokens=64)
    worker = Worker(TargetEngine(real, config, vocabulary_size=NUMBERS, max_model_len=128))
    worker.open("s", TEXT)
    check_broken(worker.answer(verify("s", len(TEXT), [right, BREAKS_IT, 3])))
    worker.open("t", TEXT)
    names = ("s", "t") if who == "itself" else ("t", "s")
    for name in names:
        assert worker.answer(verify(name, len(TEXT))).verdict.token_ids == (right,)
    assert worker.held("s").table.blocks[:2] == worker.held("t").table.blocks[:2]


# ---- the toy --------------------------------------------------------------------------------------


def test_entries_known_to_be_sound_are_kept() -> None:
    """A round's rows showed that all before them is sound; only later entries are recomputed."""
    worker, (token, *_) = target(), best(1, PROMPT)
    worker.open("s", PROMPT)
    assert worker.answer(verify("s", len(PROMPT))).verdict.token_ids == (token,)
    blocks = worker.held("s").table.blocks
    check_broken(worker.answer(verify("s", len(PROMPT) + 1, [POISON], number=2)))
    assert worker.held("s").table.length == len(PROMPT)
    assert worker.held("s").table.blocks == blocks
    again = worker.answer(verify("s", len(PROMPT) + 1, number=2))
    assert again.verdict.token_ids == best(1, [*PROMPT, token])
    worker.open("t", PROMPT)
    assert worker.answer(verify("t", len(PROMPT))).verdict.token_ids == (token,)
    assert worker.held("t").table.blocks[:2] == blocks[:2], "what was sound is found"


@pytest.mark.parametrize("reported", [{}, {"prompt_logprobs": 1}], ids=["plain", "prompt_logprobs"])
@pytest.mark.parametrize("length", [len(PROMPT), 50], ids=["one pass", "two passes"])
def test_a_breaking_prompt_does_not_affect_its_prefix(length: int, reported: dict[str, int]) -> None:
    worker, begun = target(), [i % POISON for i in range(length)]
    for name in ("s", "t"):
        worker.open(name, [*begun, POISON], **reported)
        check_broken(worker.answer(verify(name, length + 1)))
        assert worker.held(name).table.length == 0
    worker.open("u", begun)
    assert worker.answer(verify("u", length)).verdict.token_ids == best(1, begun)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_sequence_with_broken_cached_entries_recomputes(given_up: bool) -> None:
    """Another sequence's prompt broke them before its rows were looked at."""
    worker, begun = target(), [i % POISON for i in range(38)]
    worker.open("s", [*begun, POISON, *begun[:15]])
    worker.it.handle(verify("s", len(begun) + 16), 0.0)
    assert worker.it.step() == []
    if given_up:
        worker.close("s")
    worker.open("t", begun)
    worker.it.handle(verify("t", len(begun)), 0.0)
    told = {}
    while "t" not in told:
        told |= {event.sequence_id: event for event in worker.it.step()}
    assert told["t"].verdict.token_ids == best(1, begun)
    assert worker.it.sequences.prefix_index.hits > 0, "t began with what s had computed"
    if not given_up:
        while "s" not in told:
            told |= {event.sequence_id: event for event in worker.it.step()}
        check_broken(told["s"])
    worker.open("u", begun)
    assert worker.answer(verify("u", len(begun))).verdict.token_ids == best(1, begun)


def test_a_sequence_broken_by_its_own_prompt_fails() -> None:
    worker, begun = target(), [i % POISON for i in range(38)]
    worker.open("s", [*begun, POISON, *begun[:9]])
    worker.it.handle(verify("s", len(begun) + 10), 0.0)
    assert worker.it.step() == []
    worker.close("s")
    worker.open("t", [*begun, POISON])
    check_broken(worker.answer(verify("t", len(begun) + 1)))


@pytest.mark.parametrize("branches", [0, 1], ids=["when it is asked", "meanwhile"])
def test_a_draft_does_not_continue_from_broken_entries(branches: int) -> None:
    worker = draft(branches)
    worker.open("s", [*PROMPT, POISON])
    check_broken(worker.answer(DraftRound("s", 1, 1, len(PROMPT) + 1, (), 3)))
    assert worker.held("s").table.length == 0
    worker.close("s")
    worker.open("t", PROMPT)
    drafted = worker.it.handle(DraftRound("t", 1, 1, len(PROMPT), (), 3), 0.0)
    while not drafted:
        drafted = worker.it.step()
    assert drafted[0].proposal.token_ids == best(3, PROMPT)
