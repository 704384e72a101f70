"""Structured outputs in both workers: plain decoding under the mask, whatever is proposed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from harness.tiers import mostly_full

from paceline.core import limits
from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.core.messages import (
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import CHAIN, AcceptanceMode, Proposal, SamplingParams, SequenceParams, TreeShape
from paceline.decoding.acceptance import accept_block, accept_rejection
from paceline.decoding.coupled import Noise, ranked
from paceline.decoding.noise import gumbel
from paceline.decoding.rows.row_context import RowContext
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.sampling import point_mass, truncate_support
from paceline.decoding.transforms import scores_of
from paceline.engine.scheduling.mask import Restriction, restricted, restriction
from paceline.grammar import GrammarState, Mask
from target_worker.engine import TargetEngine
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, target_config
from tests.unit.decoding.test_lossless_chains import Enumeration
from tests.unit.grammar.tiny import END, LANGUAGES, TOKENS, VOCAB, Language, grammars, text_of

TARGET = ToyModel(VOCAB, seed=5)
DRAFT = TARGET.near(0.4)
PROMPT = (3, 1, 2)
N = len(PROMPT)
NAMES = list(LANGUAGES)
LONGEST = 20


def sampling_of(language: Language, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 9, "structured_outputs": language.wanted, "max_tokens": 50} | changes))


def plain(language: Language, sampling: SamplingParams) -> list[int]:
    """Greedy or coupled decoding, one token at a time: masked logits, temperature, noise, argmax."""
    tokens, state = list(PROMPT), language.start()
    while END not in tokens[N:]:
        logits = TARGET.logits(tokens).astype(np.float64)
        logits[~state.masks(tokens[N:])[0]] = -np.inf
        if len(tokens) - N < sampling.min_tokens and np.isfinite(logits).sum() > np.isfinite(logits[END]):
            logits[END] = -np.inf
        if sampling.greedy:
            tokens.append(int(logits.argmax()))
        else:
            noise = gumbel([sampling.seed or 0], [len(tokens)], VOCAB)[0].numpy()
            tokens.append(int((logits / sampling.temperature + noise).argmax()))
    return tokens[N:]


class Pair:
    """Both workers, and the ledger between them."""

    def __init__(
        self, sampling: SamplingParams, mode: AcceptanceMode = AcceptanceMode.COUPLED, branches: int = 0
    ) -> None:
        common: dict[str, Any] = {
            "vocabulary_size": VOCAB,
            "max_model_len": 100,
            "eos_token_ids": (END,),
            "clock": ManualClock(),
        }
        self.target = TargetEngine(ToyRunner(TARGET), target_config(), grammars=grammars(), **common)
        config = draft_config(support_mass=0.9, lookahead_branches=branches)
        self.draft = draft_engine(ToyRunner(DRAFT), config, grammars=grammars(), **common)
        self.params = SequenceParams(sampling, mode, N)
        self.ledger, self.round = list(PROMPT), 0
        self.foreseen: dict[tuple[int, int], Proposal] = {}
        self.went_on = 0
        for worker in (self.target, self.draft):
            self.open(worker)

    def open(self, worker: Any, epoch: int = 1) -> None:
        assert not worker.handle(OpenSequence("s", epoch, tuple(self.ledger), self.params), 0.0)

    @property
    def ended(self) -> bool:
        return END in self.ledger[N:]

    @property
    def output(self) -> list[int]:
        """The generated tokens up to the end."""
        generated = self.ledger[N:]
        return generated[: generated.index(END) + 1] if self.ended else generated

    def propose(self, k: int, shape: TreeShape = CHAIN) -> Proposal:
        self.round += 1
        command = DraftRound("s", 1, self.round, len(self.ledger), tuple(self.ledger), k, shape=shape)
        events = list(self.draft.handle(command, 0.0))
        while not any(isinstance(event, DraftProposal) for event in events):
            events += self.draft.step()
        (answer,) = [event for event in events if isinstance(event, DraftProposal)]
        return answer.proposal

    def look_ahead(self) -> None:
        """What the draft foresees is handed to the target."""
        self.foreseen = {}
        while self.draft.has_work:
            for event in self.draft.step():
                assert isinstance(event, Continuations)
                self.foreseen.update(event.proposals)

    def judge(self, proposal: Proposal) -> None:
        base = len(self.ledger)
        command = VerifyRound("s", 1, self.round, base, tuple(self.ledger), proposal)
        assert not self.target.handle(command, 0.0)
        if self.foreseen:
            assert not self.target.handle(VerifyAhead("s", 1, self.round, base, self.foreseen), 0.0)
        while self.target.has_work:
            for event in self.target.step():
                assert isinstance(event, RoundVerdict), event
                self.ledger.extend(event.verdict.token_ids)
                if event.verdict.went_on_with is not None:
                    self.went_on += 1
                    self.round += 1
        assert len(self.ledger) < LONGEST + N

    def run(self, k: int) -> list[int]:
        while not self.ended:
            proposal = self.propose(k) if k else Proposal()
            if not k:
                self.round += 1
            elif self.draft._config.lookahead_branches:
                self.look_ahead()
            self.judge(proposal)
        return self.output


def check(language: Language, output: Sequence[int]) -> None:
    assert output[-1] == END
    assert text_of(output[:-1]) in language.texts


@pytest.mark.parametrize("branches", [0, 6], ids=["", "ahead"])
@pytest.mark.parametrize("temperature", mostly_full([0.0, 1.0, 2.0], count=2))
@pytest.mark.parametrize("name", NAMES)
def test_every_k_gives_the_tokens_of_plain_decoding(name: str, temperature: float, branches: int) -> None:
    language = LANGUAGES[name]
    for seed in range(4):
        sampling = sampling_of(language, temperature=temperature, seed=seed)
        want = plain(language, sampling)
        check(language, want)
        for k in (0, 1, 2, 5):
            assert Pair(sampling, branches=branches).run(k) == want


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
@pytest.mark.parametrize("name", NAMES)
def test_ratio_modes_follow_the_grammar(name: str, mode: AcceptanceMode) -> None:
    language, outputs = LANGUAGES[name], set()
    for seed in range(12):
        pair = Pair(sampling_of(language, temperature=1.5, seed=seed), mode, branches=4 * (seed % 2))
        output = pair.run(1 + seed % 4)
        check(language, output)
        outputs.add(tuple(output))
    assert len(outputs) > 1 or name == "one text"


def test_a_target_going_on_by_itself_keeps_the_state() -> None:
    went_on = 0
    for seed, name in itertools.product(range(6), NAMES):
        language = LANGUAGES[name]
        sampling = sampling_of(language, temperature=1.0, seed=seed)
        pair = Pair(sampling, branches=8)
        assert pair.run(1) == plain(language, sampling)
        went_on += pair.went_on
    assert went_on >= 5


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["regex", "grammar", "choice"])
def test_nothing_forbidden_is_accepted(name: str, k: int) -> None:
    language = LANGUAGES[name]
    sampling = sampling_of(language, temperature=1.0)
    want = plain(language, sampling)
    rng = np.random.default_rng(0)
    for _ in range(60):
        pair = Pair(sampling)
        while not pair.ended:
            pair.round += 1
            pair.judge(Proposal(tuple(int(t) for t in rng.integers(0, VOCAB, k))))
        assert pair.output == want


@pytest.mark.parametrize("name", NAMES)
def test_the_draft_proposes_and_foresees_allowed_tokens(name: str) -> None:
    language = LANGUAGES[name]
    branches = 0
    for seed in range(6):
        pair = Pair(sampling_of(language, temperature=1.5, seed=seed), branches=12)
        proposal = pair.propose(3)
        pair.look_ahead()
        assert is_allowed(language, proposal.token_ids)
        for (accepted, token, _), following in pair.foreseen.items():
            path = (*proposal.token_ids[:accepted], token, *following.token_ids)
            assert is_allowed(language, path)
        branches += len(pair.foreseen)
    assert branches > 3


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.REJECTION])
@pytest.mark.parametrize("name", NAMES)
def test_every_path_of_a_drafts_tree_is_allowed(name: str, mode: AcceptanceMode) -> None:
    language, paths = LANGUAGES[name], 0
    for seed in range(6):
        pair = Pair(sampling_of(language, temperature=1.5, seed=seed), mode, branches=12)
        tree = pair.propose(3, TreeShape(3, 9))
        pair.look_ahead()
        for node in range(tree.num_draft_tokens):
            assert is_allowed(language, [tree.token_ids[i] for i in tree.path_to(node)])
            paths += tree.parents[node] >= 0
        for outcome, following in pair.foreseen.items():
            for node in range(following.num_draft_tokens):
                tokens = [following.token_ids[i] for i in following.path_to(node)]
                assert is_allowed(language, [*tree.accepted(outcome), outcome.next_token, *tokens])
    assert paths > 6


def is_allowed(language: Language, tokens: Sequence[int]) -> bool:
    """True when each token may come after those before it, up to the end."""
    live = tokens[: tokens.index(END) + 1] if END in tokens else tokens
    state = language.start()
    return all(state.masks(live[:i])[0][token] for i, token in enumerate(live))


@pytest.mark.parametrize("name", ["regex", "choice"])
def test_a_reopened_sequence_continues_from_the_ledger(name: str) -> None:
    language = LANGUAGES[name]
    sampling = sampling_of(language, temperature=1.0, seed=3)
    pair = Pair(sampling)
    pair.round = 1
    pair.judge(Proposal())
    assert not pair.ended
    fresh = Pair(sampling)
    fresh.ledger, fresh.round = pair.ledger, pair.round
    for worker in (fresh.target, fresh.draft):
        worker.drop("s")
        fresh.open(worker)
    assert fresh.run(2) == plain(language, sampling)


@pytest.mark.parametrize("k", [0, 3])
def test_min_tokens_yields_to_a_finished_text(k: int) -> None:
    """The choice ends after at most four tokens; until then the end waits."""
    language = LANGUAGES["choice"]
    lengths = set()
    for seed, least in itertools.product(range(5), (0, 2, 30)):
        sampling = sampling_of(language, temperature=1.0, seed=seed, min_tokens=least)
        want = plain(language, sampling)
        check(language, want)
        assert Pair(sampling).run(k) == want
        lengths.add(len(want))
    assert len(lengths) > 1


def test_a_stop_token_allowed_alone_ends_before_min_tokens() -> None:
    language = LANGUAGES["one text"]
    abc = TOKENS.index("abc")
    sampling = sampling_of(language, temperature=0, min_tokens=5, stop_token_ids=(abc,))
    pair = Pair(sampling)
    pair.round = 1
    pair.judge(Proposal())
    assert pair.ledger[N:] == [abc]


def _mask_not_advanced(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GrammarState.masks

    def stuck(self: GrammarState, generated: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        return np.repeat(right(self, generated), len(drafts) + 1, axis=0)

    monkeypatch.setattr(GrammarState, "masks", stuck)


def _state_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarState, "_go_back", lambda self, length: None)


def _draft_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_worker.sampling.sampler.restrictions_of", lambda drafts, eos_token_ids: None)


def _guesses_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_any(scores: torch.Tensor, noise: Noise, count: int) -> list[list[tuple[int, float]]]:
        return ranked(scores.nan_to_num(neginf=-100.0), noise, count)

    monkeypatch.setattr("draft_worker.sampling.draw.ranked", of_any)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("plant", "test", "arguments"),
    [
        (_mask_not_advanced, test_nothing_forbidden_is_accepted, ("regex", 3)),
        (_state_not_rolled_back, test_nothing_forbidden_is_accepted, ("regex", 3)),
        (_draft_not_masked, test_the_draft_proposes_and_foresees_allowed_tokens, ("regex",)),
        (_draft_not_masked, test_every_path_of_a_drafts_tree_is_allowed, ("regex", AcceptanceMode.COUPLED)),
        (_guesses_not_masked, test_the_draft_proposes_and_foresees_allowed_tokens, ("regex",)),
    ],
)
def test_planted_bugs_are_caught(
    plant: Callable[..., None],
    test: Callable[..., None],
    arguments: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test(*arguments)


def test_a_worker_without_a_tokenizer_refuses_by_name() -> None:
    pair = Pair(SamplingParams(seed=1))
    pair.target.grammars = None
    params = SequenceParams(sampling_of(LANGUAGES["regex"]), AcceptanceMode.COUPLED, N)
    (failed,) = pair.target.handle(OpenSequence("t", 1, PROMPT, params), 0.0)
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == "structured_outputs"
    assert not pair.target.holds("t")


def test_masks_of_all_sequences_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all would wait for the sum."""
    pair = Pair(sampling_of(LANGUAGES["regex"]))
    pair.target._budget = 512  # one pass for all
    clock, fill = pair.target._clock, GrammarState._fill
    assert isinstance(clock, ManualClock)

    def slow(state: GrammarState, row: Mask) -> None:
        clock.advance(0.05)
        fill(state, row)

    monkeypatch.setattr(GrammarState, "_fill", slow)
    names = [f"s{i}" for i in range(20)]
    expected = Pair(pair.params.sampling).run(0)
    for name in names:
        pair.target.handle(OpenSequence(name, 1, PROMPT, pair.params), 0.0)
        pair.target.sequences.get(name).grammar.clock = clock  # type: ignore[union-attr]
        command = VerifyRound(name, 1, 1, N, PROMPT, Proposal(tuple(expected[:4])))
        assert not pair.target.handle(command, 0.0)
    begun, events = clock(), []
    while pair.target.has_work:
        events += pair.target.step()
    verdicts = [event for event in events if isinstance(event, RoundVerdict)]
    assert {verdict.sequence_id for verdict in verdicts} == set(names)
    tokens = [list(verdict.verdict.token_ids) for verdict in verdicts]
    assert {tuple(of_one[: len(expected)]) for of_one in tokens} <= {
        tuple(expected[:count]) for count in range(1, 6)
    }, "no token is another one"
    lengths = [len(of_one) for of_one in tokens]
    assert max(lengths) > 1
    assert min(lengths) == 1
    most = limits.MAX_STRUCTURE_SECONDS + 0.05 * (len(names) + 1)
    assert clock() - begun <= most


def test_an_exhausted_grammar_ends_only_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft goes on without the grammar."""
    pair = Pair(sampling_of(LANGUAGES["regex"]))
    params = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, N)
    pair.target.handle(OpenSequence("free", 1, PROMPT, params), 0.0)

    def gives_up(self: GrammarState, *_: Any) -> Mask:
        raise InvalidArgumentError("structured_outputs.regex", "too complex")

    monkeypatch.setattr(GrammarState, "masks", gives_up)
    assert len(pair.propose(2).token_ids) == 2
    for name in ("s", "free"):
        pair.target.handle(VerifyRound(name, 1, 1, N, PROMPT, Proposal((1, 1))), 0.0)
    failed, verdict = pair.target.step()
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, InvalidArgumentError)
    assert (failed.sequence_id, failed.error.field) == ("s", "structured_outputs.regex")
    assert isinstance(verdict, RoundVerdict)
    assert verdict.sequence_id == "free"
    assert not pair.target.has_work


def test_a_failing_grammar_ends_only_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the draft too, where it costs speed only."""
    pair = Pair(sampling_of(LANGUAGES["regex"]))
    params = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, N)

    def breaks(self: GrammarState, *_: Any) -> Mask:
        raise IndexError("of a token")

    monkeypatch.setattr(GrammarState, "masks", breaks)
    for worker in (pair.target, pair.draft):
        worker.handle(OpenSequence("free", 1, PROMPT, params), 0.0)
        for name in ("s", "free"):
            if worker is pair.target:
                worker.handle(VerifyRound(name, 1, 1, N, PROMPT, Proposal((1, 1))), 0.0)
            else:
                worker.handle(DraftRound(name, 1, 1, N, PROMPT, 2), 0.0)
        events = []
        while worker.has_work:
            events += worker.step()
        failed, answer = events
        assert isinstance(failed, SequenceFailed)
        assert isinstance(failed.error, InternalError)
        assert (failed.sequence_id, answer.sequence_id) == ("s", "free")
        assert "token" not in failed.error.message
        assert isinstance(answer, RoundVerdict | DraftProposal)


def test_without_a_grammar_logits_are_not_copied() -> None:
    logits = torch.randn(5, VOCAB)
    assert restricted(logits, [None, None], [2, 3]) is logits


# ---- losslessness under a mask, exactly ----------------------------------------------------------------


def tables_of(
    language: Language, model: ToyModel, depth: int, sampling: SamplingParams, *, chains: bool
) -> list[torch.Tensor]:
    """Entry i: [V^i, V], what a row is drawn from after each prefix of i tokens.

    With `chains` every row is taken from a proposal that leads through its prefix, as the target has it;
    otherwise from the last row alone, as the draft has it.
    """
    params = SequenceParams(sampling, AcceptanceMode.REJECTION, N)
    state, tables = language.start(), []
    for i in range(depth):
        rows = []
        for prefix in itertools.product(range(VOCAB), repeat=i):
            drafts = (*prefix, 1, 2)[: depth - 1] if chains else prefix
            try:
                told = restriction(state, params, PROMPT, drafts, (END,), last_only=not chains)
            except InternalError:
                # A draft never comes here: what it draws is allowed.
                told = Restriction(np.ones((1, VOCAB), dtype=np.bool_), params)
            logits = torch.from_numpy(model.rows((*PROMPT, *drafts), len(told.allowed)).copy())
            row_params = RowParams.build([told.params.sampling], [len(told.allowed)])
            context = RowContext.build(row_params, [0], [drafts if chains else ()])
            scores = scores_of(restricted(logits, [told], [len(told.allowed)]), row_params, context)
            rows.append(scores.double().softmax(-1)[i if chains else 0])
        tables.append(torch.stack(rows))
    return tables


def oracle(language: Language, prefix: tuple[int, ...], temperature: float) -> np.ndarray | None:
    """The masked, renormalised distribution; None behind what cannot be."""
    state = language.start()
    for i, token in enumerate(prefix):
        if END in prefix[:i] or not state.masks(prefix[:i])[0][token]:
            return None
    if END in prefix:
        return None
    weights = TARGET.probabilities((*PROMPT, *prefix), temperature) * state.masks(prefix)[0]
    return weights / weights.sum()


@pytest.mark.parametrize("kind", ["full q", "truncated q", "point mass"])
@pytest.mark.parametrize("name", ["regex", "choice", "json"])
def test_the_output_has_the_masked_distribution(name: str, kind: str) -> None:
    """For all proposals of two tokens and all outcomes of the tests."""
    language, temperature = LANGUAGES[name], 1.3
    sampling = sampling_of(language, temperature=temperature)
    p = tables_of(language, TARGET, 3, sampling, chains=True)
    live = 0
    for i, table in enumerate(p):
        for prefix, row in zip(itertools.product(range(VOCAB), repeat=i), table, strict=True):
            want = oracle(language, prefix, temperature)
            if want is not None:
                assert float((row - torch.from_numpy(want)).abs().max()) < 1e-6
                live += 1
    assert live > 5
    q = tables_of(language, DRAFT, 2, sampling, chains=False)
    if kind == "truncated q":
        q = [_truncated(table) for table in q]
    if kind == "point mass":
        q = [point_mass(table.argmax(-1), VOCAB) for table in q]
    for accept in (accept_rejection, accept_block):
        result = Enumeration(accept, p, q)
        assert result.error < 1e-6
        assert result.accepted > 0.3


def _truncated(table: torch.Tensor) -> torch.Tensor:
    ids, probabilities, _, _ = truncate_support(table, 0.8)
    return torch.zeros_like(table).scatter_add_(1, ids, probabilities.double())
