"""Trees on a target engine: verdicts, the entries behind them, rounds that follow, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.clock import ManualClock
from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import OpenSequence, RoundVerdict, SequenceFailed, VerifyAhead, VerifyRound
from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    TokenLogprobs,
    Verdict,
)
from paceline.engine import tree_places
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import make_runner, random_model
from paceline.engine.scheduling.mask import Restriction, restriction
from paceline.engine.tree_places import TreePlaces
from target_worker.engine import TargetEngine
from tests.sim.reference import slow_tree_verdict
from tests.sim.toys import ToyModel, ToyRunner, own_choice, target_config
from tests.unit.engine.test_backend_contract import CONFIG
from tests.unit.grammar.tiny import LANGUAGES
from tests.unit.grammar.tiny import VOCAB as LANGUAGE_VOCAB
from tests.unit.workers.test_broken_token import BreakingRunner
from tests.unit.workers.test_structured_outputs import Pair, plain, sampling_of

VOCAB = 6
TOY = ToyModel(VOCAB, seed=4)
PROMPT = (1, 2, 3)
POINT = SparseDistribution(b"\1\0\0\0", b"\0\0\x80\x3f")


class Sequences:
    """Sequences of one engine, and what the coordinator would know of them."""

    def __init__(self, runner: Any, vocab_size: int = VOCAB, **config: Any) -> None:
        self.runner = runner
        self.it = TargetEngine(
            runner,
            target_config(**config),
            vocabulary_size=vocab_size,
            max_model_len=100,
            clock=ManualClock(),
        )
        self.ledgers: dict[str, list[int]] = {}
        self.rounds: dict[str, int] = {}
        self.params: dict[str, SequenceParams] = {}

    def open(self, name: str, params: SequenceParams, prompt: Sequence[int] = PROMPT) -> None:
        params = replace(params, prompt_length=len(prompt))
        self.ledgers[name], self.rounds[name], self.params[name] = list(prompt), 0, params
        assert not self.it.handle(OpenSequence(name, 1, tuple(prompt), params), 0.0)

    def ask(self, name: str, proposal: Proposal) -> list[Any]:
        self.rounds[name] += 1
        base = len(self.ledgers[name])
        return list(self.it.handle(VerifyRound(name, 1, self.rounds[name], base, (), proposal), 0.0))

    def answer(self, events: Sequence[Any] = ()) -> dict[str, Verdict]:
        """Step until all are answered."""
        told = list(events)
        while self.it._rounds:
            told += self.it.step()
        verdicts = {}
        for event in told:
            assert isinstance(event, RoundVerdict), event
            self.ledgers[event.sequence_id] += event.verdict.token_ids
            verdicts[event.sequence_id] = event.verdict
        return verdicts

    def judge(self, name: str, proposal: Proposal) -> Verdict:
        return self.answer(self.ask(name, proposal))[name]

    def check_entries(self, name: str) -> None:
        """Those of the ledger without its newest token, and nothing reserved behind them."""
        held = self.it.sequences.find(name)
        assert held is not None
        assert held.session.cached == self.ledgers[name][:-1] == self.runner.read(held.table)
        assert held.table.reserved == 0


def params_of(mode: AcceptanceMode = AcceptanceMode.COUPLED, **sampling: Any) -> SequenceParams:
    return SequenceParams(SamplingParams(**{"seed": 1} | sampling), mode, len(PROMPT))


def random_tree(
    rng: random.Random, ledger: Sequence[int], likely: Callable[[list[int]], int], vocab_size: int = VOCAB
) -> Proposal:
    """A tree many of whose nodes are likely."""
    token_ids, parents, texts = list[int](), list[int](), {-1: list(ledger)}
    for _ in range(rng.randint(1, 9)):
        parent = rng.randrange(-1, len(token_ids))
        token = likely(texts[parent]) if rng.random() < 0.6 else rng.randrange(vocab_size)
        if (parent, token) not in zip(parents, token_ids, strict=True):
            texts[len(token_ids)] = [*texts[parent], token]
            token_ids.append(token)
            parents.append(parent)
    return Proposal(tuple(token_ids), tuple(parents))


def check_rounds(mode: AcceptanceMode = AcceptanceMode.COUPLED, turns: int = 12) -> None:
    """Trees, chains, plain rounds and a prompt in shared passes; each verdict, and the entries after it."""
    rng, beside = random.Random(3), 0
    it = Sequences(ToyRunner(TOY, 200, 4), prefix_cache=True)
    for i in range(4):
        it.open(f"s{i}", params_of(mode, temperature=0.0 if i == 3 else 1.0, seed=i), PROMPT * (1 + i))
    for turn in range(turns):
        if turn == turns // 2:
            it.open("late", params_of(mode, seed=9), PROMPT * 12)
        asked, events = {}, []
        for i, (name, ledger) in enumerate(it.ledgers.items()):
            sampling = it.params[name].sampling
            tree = random_tree(rng, ledger, lambda text, s=sampling: own_choice(TOY, text, s, 3))
            if (turn + i) % 4 == 3:
                tree = Proposal()
            asked[name] = tuple(ledger), tree
            events += it.ask(name, tree)
        for name, verdict in it.answer(events).items():
            ledger_before, tree = asked[name]
            if tree.is_tree:
                path, token = slow_tree_verdict(TOY, ledger_before, it.params[name], tree)
                assert verdict.accepted_nodes == path
                assert verdict.token_ids == (*(tree.token_ids[n] for n in path), token)
                assert verdict.num_accepted == len(path)
                beside += bool(TreePlaces.of(tree.parents).moves(path)[1])
            assert verdict.num_computed_tokens == len(it.ledgers[name]) - 1
            it.check_entries(name)
    assert beside > 3


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.REJECTION])
def test_verdicts_and_entries(mode: AcceptanceMode) -> None:
    check_rounds(mode)


def entries_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyRunner, "copy_slots", lambda *_: None)


def siblings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node sees the entry of its sibling in the place of its parent's."""
    init = tree_places.Beside.__init__

    def seeing(self: tree_places.Beside, node: int, shared: int, own: tuple[int, ...]) -> None:
        wrong = shared > 0 and len(own) == 1
        init(self, node, shared - wrong, (0, *own) if wrong else own)

    monkeypatch.setattr(tree_places.Beside, "__init__", seeing)
    tree_places._places.cache_clear()


def trunk_taken_for_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the accepted path are recorded, whatever the entries hold."""
    monkeypatch.setattr(TreePlaces, "moves", lambda self, path: (len(path), []))


@pytest.mark.planted
@pytest.mark.parametrize("plant", [entries_not_moved, siblings_seen, trunk_taken_for_the_path])
def test_wrong_entries_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    try:
        with pytest.raises(AssertionError):
            check_rounds()
    finally:
        tree_places._places.cache_clear()


# ---- what follows a round ----------------------------------------------------------------------------


def choices(count: int, ledger: Sequence[int] = PROMPT, sampling: SamplingParams | None = None) -> list[int]:
    """What the target chooses next."""
    text = list(ledger)
    for _ in range(count):
        text.append(own_choice(TOY, text, sampling or params_of(temperature=0).sampling, len(PROMPT)))
    return text[len(ledger) :]


def other(token: int) -> int:
    return (token + 1) % VOCAB


def greedy(**config: Any) -> Sequences:
    it = Sequences(ToyRunner(TOY, 100, 4), **config)
    it.open("s", params_of(temperature=0))
    return it


def test_the_next_round_begins_by_the_last_accepted_node() -> None:
    """Two offers differ in their last node alone; the tree that goes on is judged as any other."""
    it, right = greedy(), choices(6)
    tree = Proposal((other(right[0]), right[0], right[1]), (-1, -1, 1))
    events = it.ask("s", tree)
    offers = {
        Outcome(2, right[2], 2): Proposal((other(right[3]), right[3]), (-1, -1)),
        Outcome(2, right[2], 0): Proposal((other(right[3]),)),
    }
    assert not it.it.handle(VerifyAhead("s", 1, 1, 3, offers), 0.0)
    told = [*events]
    while it.it.has_work:
        told += it.it.step()
    first, second = (event.verdict for event in told)
    assert (first.token_ids, first.accepted_nodes, first.went_on_with) == (tuple(right[:3]), (1, 2), 2)
    assert (second.token_ids, second.accepted_nodes) == (tuple(right[3:5]), (1,))


@pytest.mark.parametrize("late", [False, True])
def test_a_row_known_before_decides_for_all_children_of_the_root(late: bool) -> None:
    """No child has the token: no pass. One has it: the rows after the nodes alone."""
    it, right = greedy(pre_verify=True), choices(6)
    it.runner.cancellable = True
    it.judge("s", Proposal())
    it.it.step()
    rows = sum(it.runner.passes)
    if late:
        tree = Proposal((other(right[1]), other(other(right[1])), right[2]), (-1, -1, 0))
        assert it.judge("s", tree).token_ids == (right[1],)
        assert sum(it.runner.passes) == rows
    else:
        tree = Proposal((other(right[1]), right[1], right[2], right[3]), (-1, -1, 1, 2))
        verdict = it.judge("s", tree)
        assert (verdict.token_ids, verdict.accepted_nodes) == (tuple(right[1:5]), (1, 2, 3))
        assert sum(it.runner.passes) == rows + 4
    it.check_entries("s")


def test_a_tree_joins_the_last_chunk_of_a_prompt() -> None:
    """The rows of a tree are in one pass, whatever the budget leaves of it."""
    it = Sequences(ToyRunner(TOY, 200, 4), max_batch_tokens=33)
    prompt = PROMPT * 15
    it.open("s", params_of(temperature=0, prompt_logprobs=0), prompt)
    right = choices(3, prompt)
    tree = Proposal((other(right[0]), right[0], right[1], other(right[1])), (-1, -1, 1, 1))
    events = it.ask("s", tree)
    while it.it.has_work:
        events += it.it.step()
    assert events[-1].verdict.token_ids == tuple(right)
    assert sum(len(event.logprobs) for event in events[:-1]) == len(prompt) - 1
    assert sum(it.runner.passes) == len(prompt) + 4
    assert max(it.runner.passes) <= 33


def test_a_failed_pass_is_repeated_one_by_one() -> None:
    it, right = greedy(), choices(4)
    it.open("bad", params_of(temperature=0))
    it.runner.crash_on = lambda fed: RuntimeError("planted") if fed[-1] == 5 else None
    events = it.ask("s", Proposal((other(right[0]), right[0], right[1]), (-1, -1, 1)))
    events += it.ask("bad", Proposal((0, 1, 5), (-1, -1, 1)))
    while it.it.has_work:
        events += it.it.step()
    told = {event.sequence_id: event for event in events}
    assert isinstance(told["bad"], SequenceFailed)
    assert told["s"].verdict.token_ids == tuple(right[:3])


def test_the_entries_of_a_preempted_tree_are_released() -> None:
    """An older sequence takes the blocks of a younger one with a tree; nothing stays reserved."""
    it = Sequences(ToyRunner(TOY, 10, 4))
    it.open("old", params_of(temperature=0), PROMPT * 7)
    it.open("young", params_of(temperature=0), PROMPT * 2)
    right = choices(2, PROMPT * 2)
    it.judge("old", Proposal())
    tree = Proposal((other(right[0]), right[0]), (-1, -1))
    assert it.judge("young", tree).token_ids == tuple(right)
    events = it.ask("old", Proposal(tuple(range(VOCAB)) * 2, (-1,) * 6 + (0,) * 6))
    while it.it.has_work:
        events += it.it.step()
    assert isinstance(events[-1], RoundVerdict)
    assert it.runner.pool.used_blocks <= 10


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, AcceptanceMode.REJECTION])
def test_a_tree_larger_than_the_cache_fails_nothing(mode: AcceptanceMode) -> None:
    """The cache holds the longest text; where tokens are drawn, the verdict is that of the tree."""
    it = Sequences(ToyRunner(TOY, 4, 4))
    params = params_of(mode, seed=3)
    it.open("s", params, PROMPT * 4)
    right = choices(2, PROMPT * 4, params.sampling)
    tree = Proposal(
        (other(right[0]), other(other(right[0])), right[0], right[1], 0, 1), (-1, -1, -1, 2, 0, 1)
    )
    path, token = slow_tree_verdict(TOY, PROMPT * 4, params, tree)
    verdict = it.judge("s", tree)
    if mode is AcceptanceMode.COUPLED:
        assert verdict.token_ids == (right[0],)
    else:
        assert (verdict.accepted_nodes, verdict.token_ids[-1]) == (path, token)
    it.check_entries("s")


@pytest.mark.parametrize(
    ("mode", "proposal", "field"),
    [
        (AcceptanceMode.BLOCK, Proposal((1, 2), (-1, -1)), "proposal.parents"),
        (AcceptanceMode.REJECTION, Proposal((1,) * 40, tuple(range(-1, 39))), "proposal.parents"),
        (AcceptanceMode.REJECTION, Proposal((0,), (-1,), (POINT,)), "proposal.distributions"),
        (
            AcceptanceMode.REJECTION,
            Proposal((1, 0), (-1, -1), (POINT,) * 2, (0, 1)),
            "proposal.distributions",
        ),
        (AcceptanceMode.COUPLED, Proposal((1,), (-1,), (POINT,)), "proposal.distributions"),
        (AcceptanceMode.REJECTION, Proposal((1, 1), (), (POINT,) * 3, (0, 0, 1)), "proposal.tries"),
        (AcceptanceMode.COUPLED, Proposal((1, VOCAB), (-1, -1)), "proposal.token_ids"),
    ],
)
def test_refusals_name_the_field(mode: AcceptanceMode, proposal: Proposal, field: str) -> None:
    it = Sequences(ToyRunner(TOY, 50, 4))
    it.open("s", params_of(mode))
    (failed,) = it.ask("s", proposal)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == field


def test_a_trees_depth_is_bounded_by_the_models_length_not_its_nodes() -> None:
    it = Sequences(ToyRunner(TOY, 100, 4))
    it.open("s", params_of(temperature=0), (*PROMPT * 32, 0, 1))
    assert it.judge("s", Proposal((0, 1, 2, 3), (-1,) * 4)).num_computed_tokens >= 98
    it.open("t", params_of(temperature=0), (*PROMPT * 32, 0, 1))
    (failed,) = it.ask("t", Proposal((0, 1, 2), (-1, 0, 1)))
    assert failed.error.field == "proposal.token_ids"


def test_greedy_requests_of_block_mode_take_trees() -> None:
    it, right = Sequences(ToyRunner(TOY, 50, 4)), choices(2)
    it.open("s", params_of(AcceptanceMode.BLOCK, temperature=0))
    assert it.judge("s", Proposal((other(right[0]), right[0]), (-1, -1))).token_ids == tuple(right)


# ---- rows that are no numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_broken_node_leaves_the_others_as_they_are(seed: int) -> None:
    """Rows are computed apart, depth first; verdict and entries are those of a tree without the broken one.

    The broken node is never drawn. Where it is accepted, it is the last token.
    """
    rng = random.Random(seed)
    runner = BreakingRunner()
    poison = runner.poison
    it = Sequences(runner, vocab_size=poison + 1)
    params = params_of(AcceptanceMode.REJECTION, seed=seed)
    it.open("s", params)
    tree = random_tree(rng, PROMPT, lambda text: int(runner.model.logits(text).argmax()), poison)
    proposal = Proposal((*tree.token_ids, poison), (*tree.parents, rng.randrange(-1, tree.num_draft_tokens)))
    path, token = slow_tree_verdict(runner.model, PROMPT, params, proposal)
    verdict = it.judge("s", proposal)
    assert (verdict.accepted_nodes, verdict.token_ids[-1]) == (path, token)
    it.check_entries("s")
    assert len(runner.passes) > 1


# ---- along paths, as in plain decoding ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", LANGUAGES)
def test_a_tree_follows_the_grammar_as_plain_decoding_does(name: str, temperature: float) -> None:
    language, rng = LANGUAGES[name], random.Random(5)
    for seed, least in ((1, 0), (2, 3), (3, 30)):
        sampling = sampling_of(language, temperature=temperature, seed=seed, min_tokens=least)
        want = plain(language, sampling)
        pair = Pair(sampling)
        while not pair.ended:
            pair.round += 1
            place = len(pair.ledger) - 3

            def likely(text: list[int], known: list[int] = want) -> int:
                return known[min(len(text) - 3, len(known) - 1)]

            pair.judge(random_tree(rng, pair.ledger, likely, LANGUAGE_VOCAB))
            assert len(pair.ledger) - 3 > place
        assert pair.output == want


def test_a_grammar_that_takes_too_long_ends_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the last accepted token is the next one, with or without siblings."""

    def at_once(*args: Any, **options: Any) -> Restriction:
        return restriction(*args, **options | {"seconds": 0.0})

    monkeypatch.setattr("target_worker.engine.restriction", at_once)
    language = LANGUAGES["regex"]
    sampling = sampling_of(language, temperature=0.0)
    want, pair = plain(language, sampling), Pair(sampling)
    pair.round = 1
    pair.judge(Proposal(((want[0] + 1) % LANGUAGE_VOCAB, want[0], want[1]), (-1, -1, 1)))
    assert pair.ledger[3:] == want[:1]


PARAMETERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "min tokens": {"min_tokens": 9, "stop_token_ids": range(0, 90, 2)},
    "filters": {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
    "bias": {"logit_bias": {3: 4.0}, "allowed_token_ids": range(60)},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.5},
}
BAD_WORDS = tuple((a, b) for a in range(0, 97, 3) for b in range(0, 97, 2))


def real(name: str, prompt: Sequence[int]) -> Sequences:
    model = random_model(CONFIG, seed=1)
    it = Sequences(make_runner(model, num_blocks=64, block_size=4), vocab_size=97, max_batch_tokens=60)
    sampling = SamplingParams(**{"seed": 5, "logprobs": 2} | PARAMETERS.get(name, {}))
    words = BAD_WORDS if name == "bad words" else ()
    it.open("s", SequenceParams(sampling, AcceptanceMode.COUPLED, len(prompt), words), prompt)
    return it


def told(logprobs: Sequence[TokenLogprobs]) -> np.ndarray:
    return np.array([[one.token_id, one.logprob, one.rank, *one.top_token_ids] for one in logprobs])


@pytest.mark.parametrize("name", [*PARAMETERS, "bad words"])
def test_parameters_and_logprobs_are_those_of_plain_decoding(name: str) -> None:
    """On a real model; the entries after each verdict are those of a prompt with these tokens."""
    prompt, rng = (3, 1, 4, 1, 5, 9, 2, 6), random.Random(1)
    alone, rows = real(name, prompt), list[TokenLogprobs]()
    while len(rows) < 24:
        rows += alone.judge("s", Proposal()).logprobs
    want = alone.ledgers["s"]
    it, found, accepted = real(name, prompt), list[TokenLogprobs](), 0
    fresh = it.runner.new_table()
    while len(found) < 18:
        tree = random_tree(rng, it.ledgers["s"], lambda text: want[min(len(text), len(want) - 1)], 97)
        verdict = it.judge("s", tree)
        found += verdict.logprobs
        accepted += verdict.num_accepted
        check_real_entries(it, fresh)
    assert it.ledgers["s"][: len(want)] == want[: len(it.ledgers["s"])]
    np.testing.assert_allclose(told(found)[:24], told(rows)[: len(found)], atol=1e-4)
    assert accepted > 8


def check_real_entries(it: Sequences, fresh: Any) -> None:
    held = it.it.sequences.find("s")
    assert held is not None
    assert held.session.cached == it.ledgers["s"][:-1]
    it.runner.forward([SequenceInput(fresh, held.session.cached, 0)])
    slots = [table.slots(0, held.table.length) for table in (held.table, fresh)]
    for entries in it.runner.cache.entries:
        torch.testing.assert_close(entries[slots[0]], entries[slots[1]], atol=1e-4, rtol=1e-4)
    fresh.free()
