"""The contract of drafters: every registered one keeps it, and planted wrong ones break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from draft_worker.drafters.interface import Drafter
from draft_worker.drafters.model import ModelDrafter
from draft_worker.drafters.registry import DRAFTERS, kind_of
from draft_worker.drafters.tokens import (
    FixedScorer,
    Row,
    TextScorer,
    TokenBranch,
    TokenBranches,
    TokenDrafter,
    TokenState,
    TokenStates,
    state_of,
)
from paceline.core.clock import ManualClock
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.messages import DraftProposal, OpenSequence
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.cancel import CancelToken
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from paceline.engine.scheduling.passes import Job
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.telemetry.worker import Passes
from tests.integration.seams.toys import uniform_drafter
from tests.sim.toys import ToyModel, ToyRunner, draft_config

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
OTHERS = {"a": (2, 7, 1), "b": (8, 2, 8, 1, 8, 2, 8, 4, 5), "c": (9,)}
BAD = 10**6
"""A token that drafters which look at it cannot score."""
ROWS = 7
"""Of a step: fewer than the prompts have."""
TOY = ToyModel(10, seed=4)
Held = HeldSequence[DraftProposal]


class Case:
    """One drafter, and short words for what is asked of it."""

    def __init__(self, drafter: Drafter) -> None:
        self.it = drafter
        self.free = drafter.free_entries

    def open(self, name: str, tokens: tuple[int, ...] = (0,)) -> Held:
        """`tokens`: its ledger, whose entries may come from a prefix cache and go there."""
        params = SequenceParams(SamplingParams(temperature=0, seed=1), AcceptanceMode.COUPLED, 1)
        self.it.sequences.open(OpenSequence(name, 1, tokens, params))
        return self.it.sequences.get(name)

    def feed(self, feeds: Mapping[str, Sequence[int]], rows: int = 1) -> dict[str, Any]:
        """The last rows of each feed, or its error."""
        jobs = [Job(self._held(name), list(tokens), rows, 0.0) for name, tokens in feeds.items()]
        results: dict[str, Any] = {}
        while jobs:
            done = self.it.step(
                jobs, max_rows=ROWS, max_prefill_rows=None, free_branches=lambda: False, passes=Passes()
            )
            results.update((job.sequence_id, error) for job, error in done.failed)
            if done.logits is not None:
                parts = torch.split(done.logits, [job.rows for job in done.finished])
                results.update(
                    (job.sequence_id, part) for job, part in zip(done.finished, parts, strict=True)
                )
            jobs = [job for job in jobs if job.sequence_id not in results]
        return results

    def _held(self, name: str) -> Held:
        return self.it.sequences.find(name) or self.open(name)

    def fresh(self, tokens: Sequence[int], rows: int = 1) -> torch.Tensor:
        """The scores of a text that is fed whole to a new sequence."""
        self.open("fresh", tuple(tokens))
        scores: torch.Tensor = self.feed({"fresh": tokens}, rows)["fresh"]
        self.it.sequences.drop("fresh")
        return scores

    def step(self, branch: Any, *tokens: int) -> torch.Tensor:
        """The score after each of some tokens, fed to a branch one by one."""
        return torch.cat([self.it.step_branches([branch], [token]) for token in tokens])

    def close(self) -> None:
        for held in list(self.it.sequences):
            self.it.sequences.drop(held.session.sequence_id)

    def check_same(self, scores: Any, expected: torch.Tensor) -> None:
        assert isinstance(scores, torch.Tensor), scores
        assert scores.shape == expected.shape
        if self.it.skills.row_invariant:
            assert torch.equal(scores, expected)
        else:
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def check_rollback(case: Case) -> None:
    """After a rollback a sequence scores as a new one does."""
    held = case._held("s")
    case.feed({"s": PROMPT})
    case.feed({"s": (7, 7, 7)})
    for length in (len(PROMPT) + 1, len(PROMPT), 4, 0):
        held.cut_to(length)
        assert held.num_computed_tokens == length
        case.check_same(case.feed({"s": (8, 2)})["s"], case.fresh((*(*PROMPT, 7)[:length], 8, 2)))
        assert held.session.cached[length:] == [8, 2]
        held.cut_to(length)


def check_rows(case: Case) -> None:
    """All wanted rows come, in order, and are those of texts that end there."""
    scores = case.feed({"s": PROMPT, **OTHERS, "c": (9, 9, 9)}, rows=3)
    for name, tokens in {"s": PROMPT, **OTHERS, "c": (9, 9, 9)}.items():
        case.check_same(scores[name], torch.cat([case.fresh(tokens[: len(tokens) - i]) for i in (2, 1, 0)]))


def check_neighbours(case: Case) -> None:
    """What else is in a step changes no score."""
    alone = {name: case.fresh(tokens) for name, tokens in {"s": PROMPT, **OTHERS}.items()}
    for name, scores in case.feed({"s": PROMPT, **OTHERS}).items():
        case.check_same(scores, alone[name])
    next_ones = case.feed({"s": (5,), "a": (6,), "b": (7,)})
    for name, token in (("s", 5), ("a", 6), ("b", 7)):
        text = {"s": PROMPT, **OTHERS}[name]
        case.check_same(next_ones[name], case.fresh((*text, token)))


def check_branches(case: Case) -> None:
    """Branches score as sequences do, apart from each other, and leave their sequence as it was."""
    held = case._held("s")
    case.feed({"s": PROMPT})
    region = case.it.fork(held, 20)
    after, before = region.branch(len(PROMPT)), region.branch(len(PROMPT) - 2)
    assert (after.length, before.length) == (len(PROMPT), len(PROMPT) - 2)
    together = case.it.step_branches([after, before], [7, 2])
    case.check_same(together, torch.cat([case.fresh((*PROMPT, 7)), case.fresh((*PROMPT[:-2], 2))]))
    child = after.cut(after.length)
    case.check_same(case.step(after, 4), case.fresh((*PROMPT, 7, 4)))
    case.check_same(case.step(child, 5, 6), case.fresh((*PROMPT, 7, 5, 6), rows=2))
    assert (after.length, child.length) == (len(PROMPT) + 2, len(PROMPT) + 3)
    shorter = child.cut(len(PROMPT) + 2)
    case.check_same(case.step(shorter, 1), case.fresh((*PROMPT, 7, 5, 1)))
    copy = region.branch(len(PROMPT))
    case.it.extend_branch(copy, child, 2)
    assert copy.length == len(PROMPT) + 2
    case.check_same(case.step(copy, 8), case.fresh((*PROMPT, 7, 5, 8)))
    region.free()
    assert held.num_computed_tokens == len(PROMPT)
    case.check_same(case.feed({"s": (7,)})["s"], case.fresh((*PROMPT, 7)))


def check_adoption(case: Case) -> None:
    """A branch that is adopted is the sequence."""
    for kept in (len(PROMPT), len(PROMPT) - 3):
        held = case._held("s")
        case.feed({"s": PROMPT})
        region = case.it.fork(held, 20)
        branch, other = region.branch(kept), region.branch(len(PROMPT))
        case.step(branch, 7, 4)
        case.step(other, 1)
        case.it.adopt(held, branch)
        region.free()
        assert held.num_computed_tokens == kept + 2
        held.session.cached = [*PROMPT[:kept], 7, 4]
        case.check_same(case.feed({"s": (8,)})["s"], case.fresh((*PROMPT[:kept], 7, 4, 8)))
        held.cut_to(kept + 1)
        case.check_same(case.feed({"s": (8,)})["s"], case.fresh((*PROMPT[:kept], 7, 8)))
        case.close()


def check_chains(case: Case) -> None:
    """A chain draws what steps would; it leaves the entries of all but its last token."""
    skills = case.it.skills.chains
    if skills is None:
        return
    held = case._held("s")
    case.feed({"s": PROMPT})
    (chain,) = case.it.draw_chains([ChainInput(held.table, (7,), 4)])
    if not chain.token_ids:
        return
    held.fed([7, *chain.token_ids[:-1]])
    text = [*PROMPT, 7]
    for token in chain.token_ids:
        assert token == int(case.fresh(text).argmax())
        text.append(token)
    assert held.num_computed_tokens == len(PROMPT) + len(chain.token_ids)
    case.check_same(case.feed({"s": (chain.token_ids[-1],)})["s"], case.fresh(text))


def check_errors(case: Case) -> None:
    """A feed that cannot be scored fails alone, and its sequence can go on from its last sound state."""
    case.feed({"s": PROMPT, "bad": (1, 2)})
    held = case._held("bad")
    results = case.feed({"a": OTHERS["a"], "bad": (BAD,), "s": (7,)})
    case.check_same(results["a"], case.fresh(OTHERS["a"]))
    case.check_same(results["s"], case.fresh((*PROMPT, 7)))
    assert isinstance(results["bad"], torch.Tensor | PacelineError)
    held.cut_to(min(2, held.num_computed_tokens))
    rest = (1, 2)[held.num_computed_tokens :]
    case.check_same(case.feed({"bad": (*rest, 3)})["bad"], case.fresh((1, 2, 3)))


def check_release(case: Case) -> None:
    """What sequences and branches took is free again when they are gone."""
    held = case._held("s")
    case.feed({"s": PROMPT, **OTHERS})
    region = case.it.fork(held, 20)
    case.step(region.branch(len(PROMPT)), 7, 4)
    region.free()
    state = held.state
    case.close()
    assert len(case.it.sequences) == state.length == 0
    assert case.it.free_entries == case.free


CONTRACT: tuple[Callable[[Case], None], ...] = (
    check_rollback,
    check_rows,
    check_neighbours,
    check_branches,
    check_adoption,
    check_chains,
    check_errors,
    check_release,
)


# ---- the drafters -------------------------------------------------------------------------------------


class Hashed(FixedScorer):
    """Scores that depend on every token of a text."""

    def score(self, text: Sequence[int], row: Row) -> None:
        if BAD in text:
            raise RuntimeError("no such token")
        row[:] = TOY.logits(text)


class HashedCounts(Hashed):
    """As one that keeps what it counts, and would tell if it were not told of every change."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def count(self, text: Sequence[int], length: int) -> None:
        self.counted = list(text[:length])

    def score(self, text: Sequence[int], row: Row) -> None:
        assert self.counted == list(text)
        super().score(text, row)


def of_tokens(scorer: type[TextScorer] = Hashed) -> Drafter:
    return TokenDrafter(scorer, 10, draft_config(), ManualClock())


def a_toy_model(skills: ChainSkills | None = None) -> ToyRunner:
    runner = ToyRunner(TOY, num_blocks=60, block_size=4)
    runner.chain_skills = skills
    runner.crash_on = lambda tokens: RuntimeError("no such token") if BAD in tokens else None
    return runner


def of_a_toy_model(skills: ChainSkills | None = None) -> Drafter:
    return ModelDrafter(a_toy_model(skills), draft_config(), ManualClock())


@cache
def registered(name: str) -> Drafter:
    """As a worker's process makes it; the embedded draft's weights, or its tokenizer alone."""
    config = DraftConfig(model="embedded:draft", drafter=name, num_blocks=60, threads=1, device="cpu")
    kind = kind_of(config)
    return kind.make(kind.load(config), config, ManualClock())


DRAFTERS_HERE: dict[str, Callable[[], Drafter]] = {
    "tokens": of_tokens,
    "counts": lambda: of_tokens(HashedCounts),
    "toy model": of_a_toy_model,
    "toy model with chains": lambda: of_a_toy_model(ChainSkills(max_feed=16)),
}


STACKED = ("stacked:ngram+bigram", "stacked:bigram+ngram+random")


@pytest.fixture(scope="module", autouse=True)
def _uniform() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(DRAFTERS, uniform_drafter.NAME, None)  # removed afterwards
        uniform_drafter.register()
        yield


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", [*DRAFTERS_HERE, *DRAFTERS, *STACKED, uniform_drafter.NAME])
def test_a_drafter_keeps_the_contract(name: str, check: Callable[[Case], None]) -> None:
    make = DRAFTERS_HERE.get(name, lambda: registered(name))
    case = Case(make())
    check(case)
    case.close()
    assert case.it.free_entries == case.free


@pytest.mark.parametrize(
    ("drafter", "corpus", "field", "message"),
    [
        ("modle", "", "drafter", "must be one of model, unigram, .* or stacked:a\\+b, got 'modle'"),
        ("ngram:4", "", "drafter", "must be one of"),
        ("stacked", "", "drafter", "must be one of"),
        ("stacked:ngram", "", "drafter", "takes two or more of unigram, bigram, ngram, random"),
        ("stacked:ngram+", "", "drafter", "takes two or more"),
        ("stacked:ngram+model", "", "drafter", "takes two or more"),
        ("stacked:unigram+ngram", "", "drafter", "unigram has a context after every text"),
        ("stacked:ngram+random+bigram", "", "drafter", "random has a context after every text"),
        ("ngram", "text", "corpus", "is not read by the drafter ngram"),
        ("model", "text", "corpus", "is not read by the drafter model"),
        ("stacked:ngram+random", "text", "corpus", "is not read by the drafter stacked:ngram"),
    ],
)
def test_an_impossible_drafter_is_refused(drafter: str, corpus: str, field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        kind_of(DraftConfig(model="m", drafter=drafter, corpus=corpus))
    assert refused.value.field == field


@pytest.mark.parametrize("drafter", ["unigram", "bigram", "stacked:ngram+unigram", "stacked:bigram+random"])
def test_a_corpus_is_taken_where_it_is_read(drafter: str) -> None:
    assert kind_of(DraftConfig(model="m", drafter=drafter, corpus="text")).reads_corpus


# ---- wrong ones ---------------------------------------------------------------------------------------


class LateState(TokenState):
    """Keeps one token too many."""

    def truncate_to(self, length: int) -> int:
        super().truncate_to(length + 1)
        return length


class Mixing(TokenDrafter):
    """Its scores are shifted by those of their neighbours."""

    def step(self, feeds: Sequence[Job], **how: Any) -> Any:
        result = super().step(feeds, **how)
        if result.logits is not None:
            result.logits = result.logits + result.logits.mean(0)
        return result


class Swapping(TokenDrafter):
    """Gives rows in the wrong order."""

    def step(self, feeds: Sequence[Job], **how: Any) -> Any:
        result = super().step(feeds, **how)
        if result.logits is not None:
            result.logits = result.logits.flip(0)
        return result


class Unwound(TokenBranch):
    """Leaves the sequence with the branch's text."""

    def score(self, row: Row) -> None:
        self.replace_end()
        self.sequence.scorer.score(self.sequence.token_ids, row)


@dataclass(frozen=True, slots=True)
class OneBranch(TokenBranches):
    """All branches do."""

    def branch(self, kept: int) -> TokenBranch:
        return Unwound(self.sequence, kept)


class Sharing(TokenDrafter):
    """See `OneBranch`."""

    def fork(self, held: Held, max_entries: int) -> TokenBranches:
        return OneBranch(state_of(held))


class Forgetful(TokenDrafter):
    """Loses the last token of what it adopts."""

    def adopt(self, held: Held, branch: TokenState) -> None:
        super().adopt(held, branch.cut(branch.length - 1))


class Brittle(TokenDrafter):
    """One feed's error is everyone's."""

    def step(self, feeds: Sequence[Job], **how: Any) -> Any:
        result = super().step(feeds, **how)
        if result.failed:
            raise RuntimeError
        return result


class Keeping(TokenDrafter):
    """Never gives anything back."""

    free_entries = property(lambda self: -self.sequences._opened)  # type: ignore[assignment]


class LateStates(TokenStates):
    """Makes those."""

    def new(self, salt: str) -> TokenState:
        return LateState(self.new_scorer())


class Late(TokenDrafter):
    """See `LateState`."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.sequences.states = LateStates(Hashed)


class Misspelling(ModelDrafter):
    """Its chains draw other tokens than those it takes in."""

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        drawn = super().draw_chains(chains, cancel)
        return [replace(chain, token_ids=[9 - token for token in chain.token_ids]) for chain in drawn]


@pytest.mark.planted
@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Late, check_rollback),
        (Swapping, check_rows),
        (Mixing, check_neighbours),
        (Sharing, check_branches),
        (Forgetful, check_adoption),
        (Brittle, check_errors),
        (Keeping, check_release),
    ],
)
def test_a_wrong_drafter_breaks_the_contract(
    wrong: type[TokenDrafter], check: Callable[[Case], None]
) -> None:
    drafter = wrong(Hashed, 10, draft_config(), ManualClock())
    with pytest.raises((AssertionError, RuntimeError)):
        check(Case(drafter))


@pytest.mark.planted
def test_wrong_chains_break_the_contract() -> None:
    runner = a_toy_model(ChainSkills(max_feed=16))
    with pytest.raises(AssertionError):
        check_chains(Case(Misspelling(runner, draft_config(), ManualClock())))
