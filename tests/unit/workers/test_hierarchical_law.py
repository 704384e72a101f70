"""The law of hierarchical drafts, by exact enumeration: whatever is guessed, a chain is a draw from q.

All probabilities of the toy draft are multiples of 1/G. Each draw inverts q at a uniform number, so G
numbers, one in the middle of each G-th, stand for all. The engine draws a chain for every combination of
them, and counts of chains must be exactly their probabilities.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from draft_worker import sub_drafters
from draft_worker.sampling import draw, guesses
from draft_worker.sampling.draw import Drawn, NoiseTape
from draft_worker.sampling.partial_draft import PartialDraft
from paceline.core.clock import ManualClock
from paceline.core.messages import CloseSequence, DraftRound, OpenSequence
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams, SparseDistribution
from paceline.decoding.noise import Purpose
from tests.sim.reference import dense
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine

G = 4
PROMPT = (0, 1)
Chain = tuple[int, ...]


class Quarters(ToyModel):
    """Probabilities that are multiples of 1/G, some of them 0, after every prefix."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        parts = [w for w in itertools.product(range(G + 1), repeat=vocab_size) if sum(w) == G]
        chosen = np.random.default_rng(vocab_size).integers(len(parts), size=len(self.table))
        self.q = np.array(parts)[chosen] / G
        with np.errstate(divide="ignore"):
            self.table = np.log(self.q).astype(np.float32)

    def after(self, prefix: Sequence[int]) -> np.ndarray:
        table, self.table = self.table, self.q
        try:
            return self.rows(prefix, 1)[0]
        finally:
            self.table = table


@cache
def model(vocab_size: int) -> Quarters:
    return Quarters(vocab_size)


class Scripted:
    """Guesses `first` at the beginning of a round, and `later` where some of it was wrong."""

    def __init__(self, first: Chain, later: Chain) -> None:
        self.first, self.later = first, later

    def guess(self, ledger: Sequence[int], drawn: Sequence[int], most: int) -> Sequence[int]:
        return (self.later if drawn else self.first)[:most]


def of_digits(seed: int, count: int) -> list[float]:
    """The middle of a G-th for each digit of a number in base G."""
    return [(seed // G**i % G + 0.5) / G for i in range(count)]


def enumerated(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, k: int, guess: Scripted, spare: int = 0
) -> tuple[list[Proposal], list[int]]:
    """The proposal of every combination of `k` + `spare` numbers, and the rows of each pass."""
    monkeypatch.setitem(sub_drafters.SUB_DRAFTERS, "scripted", lambda: guess)

    def numbers(
        seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, count: int, *, draft_index: int
    ) -> torch.Tensor:
        assert purpose is Purpose.DRAFT_DRAW
        return torch.tensor([of_digits(seed, count) for seed in seeds], dtype=torch.float64)

    monkeypatch.setattr(draw, "uniforms", numbers)
    runner = ToyRunner(model(vocab_size), num_blocks=1000, block_size=4)
    config = draft_config(
        sub_drafter="scripted", support_mass=1.0, max_batch_tokens=4096, max_sequences=G ** (k + spare)
    )
    engine = draft_engine(runner, config, vocabulary_size=vocab_size, max_model_len=60, clock=ManualClock())
    found = []
    for seed in range(G ** (k + spare)):
        params = SequenceParams(SamplingParams(seed=seed), AcceptanceMode.REJECTION, len(PROMPT))
        assert engine.handle(OpenSequence(str(seed), 1, PROMPT, params), 0.0) == []
        assert engine.handle(DraftRound(str(seed), 1, 1, len(PROMPT), (), k), 0.0) == []
    while engine.has_work:
        for event in engine.step():
            held = engine.sequences.get(event.sequence_id)
            assert runner.read(held.table) == [*PROMPT, *event.proposal.token_ids[:-1]]
            found.append(event.proposal)
            engine.handle(CloseSequence(event.sequence_id, 1), 0.0)
    assert len(found) == G ** (k + spare)
    return found, runner.passes


def check_law(found: Sequence[Proposal], vocab_size: int) -> None:
    """Chains are as frequent as q makes them, and what is sent of each token is the q it was drawn from."""
    counts = Counter(proposal.token_ids for proposal in found)
    for chain in itertools.product(range(vocab_size), repeat=found[0].num_draft_tokens):
        q = [model(vocab_size).after([*PROMPT, *chain[:i]])[token] for i, token in enumerate(chain)]
        assert counts[chain] == len(found) * np.prod(q)
    for proposal in found:
        for i, sent in enumerate(proposal.distributions):
            q = model(vocab_size).after([*PROMPT, *proposal.token_ids[:i]])
            np.testing.assert_allclose(dense(sent, vocab_size), q, atol=1e-6)


@pytest.mark.parametrize(("vocab_size", "k"), [(2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_a_chain_is_drawn_from_q_whatever_is_guessed(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, k: int
) -> None:
    """All guesses of every length, for the beginning of a round and behind a wrong guess."""
    tokens = range(vocab_size)
    firsts = [g for length in range(k) for g in itertools.product(tokens, repeat=length)]
    for number, first in enumerate(firsts):
        later = (number % vocab_size,) * (number % 2)
        found, passes = enumerated(monkeypatch, vocab_size, k, Scripted(first, later))
        check_law(found, vocab_size)
        assert passes[0] == G**k * (len(PROMPT) + len(first))
        assert len(passes) <= k


# ---- wrong ones ---------------------------------------------------------------------------------------

Rows = Sequence[Drawn | None]
Confirm = Callable[[Rows, Sequence[int]], list[Drawn | None]]
confirmed = guesses._confirmed
paths = guesses._paths


def sending_the_guess(rows: Rows, guess: Sequence[int]) -> list[Drawn | None]:
    """What is sent of a token that was guessed is the sub-drafter's point mass."""
    told = list(confirmed(rows, guess))
    for i, (token, guessed) in enumerate(zip(told, guess, strict=False)):
        if token is not None and token.token_id == guessed:
            mass = SparseDistribution(np.uint32(guessed).tobytes(), np.float32(1).tobytes())
            told[i] = replace(token, distribution=mass)
    return told


def taking_every_guess(rows: Rows, guess: Sequence[int]) -> list[Drawn | None]:
    """A guess is taken without being checked, where q permits it."""
    told = list(rows)
    for i, (token, guessed) in enumerate(zip(rows, guess, strict=False)):
        assert token is not None
        if guessed not in np.frombuffer(token.distribution.token_ids, "<u4"):
            return told[: i + 1]
        told[i] = replace(token, token_id=guessed)
    return told


def stopping_late(rows: Rows, guess: Sequence[int]) -> list[Drawn | None]:
    """The row behind a wrong guess counts too."""
    return list(rows[: len(confirmed(rows, guess)) + 1])


def with_the_spare_number(real: Any) -> Any:
    """A wrong guess is followed by a fresh draw from the whole q: the guessed token gets a second chance."""

    def draw_guessed(sampler: Any, work: Any, logits: torch.Tensor) -> Any:
        told = real(sampler, work, logits)
        for (draft, guess), tokens in zip(work, told, strict=True):
            last = tokens[-1]
            if len(tokens) > len(guess) or last.token_id == guess[len(tokens) - 1]:
                continue
            q = dense(last.distribution, VOCAB)
            u = of_digits(draft.params.sampling.seed, draft.k + 1)[-1]
            tokens[-1] = replace(last, token_id=int((q.cumsum() > u).argmax()))
        return told

    return draw_guessed


def reusing_a_number(draft: PartialDraft, guess: Sequence[int]) -> list[PartialDraft]:
    """A step begins with the number that drew the token of the last step."""
    if not draft.drawn:
        return paths(draft, guess)
    u = draft.tape.uniforms
    assert u is not None
    return paths(replace(draft, tape=NoiseTape(uniforms=torch.cat([u[:1], u[:-1]]))), guess)


VOCAB = 3


@pytest.mark.planted
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_confirmed", sending_the_guess),
        ("_confirmed", taking_every_guess),
        ("_confirmed", stopping_late),
        ("_paths", reusing_a_number),
    ],
)
def test_a_wrong_check_of_guesses_breaks_the_law(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(guesses, name, wrong)
    with pytest.raises(AssertionError):
        check_law(enumerated(monkeypatch, VOCAB, 3, Scripted((1, 2), (1,)))[0], VOCAB)


@pytest.mark.planted
def test_a_second_chance_for_the_guess_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    from draft_worker import drawing

    monkeypatch.setattr(drawing, "draw_guessed", with_the_spare_number(drawing.draw_guessed))
    found, _ = enumerated(monkeypatch, VOCAB, 2, Scripted((1,), ()), spare=1)
    with pytest.raises(AssertionError):
        check_law(found, VOCAB)
