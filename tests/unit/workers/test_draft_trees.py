"""The draft worker without sockets: trees in place of chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draft_worker.drafters.registry import DRAFTERS
from draft_worker.engine import DraftEngine
from paceline.core.clock import ManualClock
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import CloseSequence, DraftProposal, DraftRound, OpenSequence, SequenceFailed
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams, TreeShape
from tests.sim.reference import check_slow_tries, slow_tree
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, own_choice
from tests.unit.workers.test_drafter_contract import registered

VOCAB = 6
MODEL = ToyModel(VOCAB, seed=4)
PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0, seed=1)
WARM = SamplingParams(temperature=0.9, repetition_penalty=1.0, seed=3)
SAMPLINGS = {"greedy": GREEDY, "warm": WARM}
SHAPE = TreeShape(3, 9)
K = 4


class Worker:
    """A draft engine and short words for what is asked of it."""

    def __init__(self, num_blocks: int = 60, max_model_len: int = 60, **config: Any) -> None:
        self.runner = ToyRunner(MODEL, num_blocks, 4)
        self.it = draft_engine(
            self.runner,
            draft_config(support_mass=0.9, **config),
            vocabulary_size=VOCAB,
            max_model_len=max_model_len,
            clock=ManualClock(),
        )

    def open(
        self,
        sampling: SamplingParams = GREEDY,
        name: str = "s",
        mode: AcceptanceMode = AcceptanceMode.COUPLED,
        draft_index: int = 0,
    ) -> SequenceParams:
        params = SequenceParams(sampling, mode, len(PROMPT), draft_index=draft_index)
        assert not self.it.handle(OpenSequence(name, 1, PROMPT, params), 0.0)
        return params

    def ask(
        self,
        name: str = "s",
        number: int = 1,
        ledger: tuple[int, ...] = PROMPT,
        k: int = K,
        shape: TreeShape = SHAPE,
    ) -> list[Any]:
        return list(self.it.handle(DraftRound(name, 1, number, len(ledger), ledger, k, shape=shape), 0.0))

    def run(self) -> list[Any]:
        events: list[Any] = []
        while self.it.has_work:
            events += self.it.step()
        return events

    def cached(self, name: str = "s") -> list[int]:
        held = self.it.sequences.find(name)
        assert held is not None
        return self.runner.read(held.table)

    def tree(self, **asked: Any) -> Proposal:
        """Of a round that is answered."""
        events = [*self.ask(**asked), *self.run()]
        (event,) = (event for event in events if not isinstance(event, SequenceFailed))
        assert isinstance(event, DraftProposal)
        assert event.num_computed_tokens == event.base_length
        return event.proposal


def same(one: Proposal, other: Proposal) -> bool:
    return (one.token_ids, one.parents) == (other.token_ids, other.parents)


@pytest.mark.parametrize("shape", [TreeShape(2, 5), SHAPE, TreeShape(6, 30), TreeShape(2, 1)])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_tree_is_the_slow_ones(name: str, shape: TreeShape) -> None:
    worker = Worker()
    params = worker.open(SAMPLINGS[name])
    tree = worker.tree(shape=shape)
    assert tree == slow_tree(MODEL, PROMPT, params, K, shape)
    assert tree.num_draft_tokens == shape.nodes
    assert worker.cached() == [*PROMPT]


def accepted_of(tree: Proposal, sampling: SamplingParams) -> int:
    """Number of tokens that a target of the same model follows."""
    ledger, node = [*PROMPT], -1
    while True:
        ledger.append(own_choice(MODEL, ledger, sampling, len(PROMPT)))
        children = (i for i, parent in enumerate(tree.parents) if parent == node)
        node = next((i for i in children if tree.token_ids[i] == ledger[-1]), -1)
        if node == -1:
            return len(ledger) - len(PROMPT) - 1


def test_a_target_of_the_same_model_follows_a_tree_to_its_end() -> None:
    accepted = []
    for seed in range(30):
        worker, sampling = Worker(), SamplingParams(temperature=0.9, seed=seed)
        worker.open(sampling)
        accepted.append(accepted_of(worker.tree(shape=TreeShape(3, 24)), sampling))
    assert accepted.count(K) >= 27, accepted


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, repetition_penalty=1.7, frequency_penalty=0.4, seed=5),
        SamplingParams(temperature=0.8, allowed_token_ids=(0, 2, 5), seed=5),
        SamplingParams(temperature=0, presence_penalty=1.5, seed=5),
    ],
)
def test_penalties_follow_each_path(sampling: SamplingParams) -> None:
    """Each node's row depends on its own path: equal to what a ledger with that path would give."""
    worker, depth = Worker(), 3
    worker.open(sampling)
    tree = worker.tree(k=depth)
    for node in range(tree.num_draft_tokens):
        path = tree.path_to(node)
        if len(path) == depth:
            continue
        children = [tree.token_ids[i] for i, parent in enumerate(tree.parents) if parent == node]
        other = Worker()
        other.open(sampling)
        ledger = (*PROMPT, *(tree.token_ids[i] for i in path))
        first = other.tree(ledger=ledger, k=1, shape=TreeShape(3, 3))
        assert list(first.token_ids[: len(children)]) == children
    assert tree.depth == depth


def test_many_trees_share_passes_with_chains() -> None:
    worker = Worker()
    params = {f"s{i}": worker.open(sampling, f"s{i}") for i, sampling in enumerate((GREEDY, WARM, WARM))}
    for name in ("s0", "s1"):
        worker.ask(name)
    worker.ask("s2", shape=TreeShape())
    answers = {event.sequence_id: event.proposal for event in worker.run()}
    for name in ("s0", "s1"):
        assert answers[name] == slow_tree(MODEL, PROMPT, params[name], K, SHAPE)
    assert not answers["s2"].is_tree
    assert worker.runner.passes[0] == 3 * len(PROMPT), "the ledgers of all"
    assert len(worker.runner.passes) == 1 + (K - 1) + (K - 1), "levels of both trees, and steps of the chain"


def test_passes_of_trees_respect_the_row_budget() -> None:
    worker = Worker(max_batch_tokens=33, num_blocks=200, max_sequences=8)
    params = {f"s{i}": worker.open(SamplingParams(temperature=0.9, seed=i), f"s{i}") for i in range(4)}
    wide = TreeShape(16, 64)
    for name in params:
        worker.ask(name, shape=wide)
    answers = {event.sequence_id: event.proposal for event in worker.run()}
    assert answers == {name: slow_tree(MODEL, PROMPT, of, K, wide) for name, of in params.items()}
    assert max(worker.runner.passes) == 33


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("deep", range(K + 1))
def test_accepted_tokens_are_not_fed_again(name: str, deep: int) -> None:
    worker = Worker()
    params = worker.open(SAMPLINGS[name])
    tree = worker.tree(shape=TreeShape(3, 24))
    deepest = max(range(tree.num_draft_tokens), key=lambda node: len(tree.path_to(node)))
    accepted = [tree.token_ids[node] for node in tree.path_to(deepest)][:deep]
    assert len(accepted) == deep
    worker.runner.passes.clear()
    ledger = (*PROMPT, *accepted, 0)
    again = worker.tree(number=2, ledger=ledger)
    assert again == slow_tree(MODEL, ledger, params, K, SHAPE)
    assert worker.cached() == [*ledger]
    assert worker.runner.passes[0] == (1 if deep < K else 2), "the last level was never fed"


def test_a_chain_goes_on_from_a_tree_and_back() -> None:
    worker = Worker()
    params = worker.open(WARM)
    tree = worker.tree()
    ledger = (*PROMPT, tree.token_ids[0], 5)
    (answer,) = [*worker.ask(number=2, ledger=ledger, shape=TreeShape()), *worker.run()]
    own = [*ledger]
    for _ in range(K):
        own.append(own_choice(MODEL, own, WARM, len(PROMPT)))
    assert answer.proposal.token_ids == (*own[len(ledger) :],)
    ledger = (*own, 2)
    assert worker.tree(number=3, ledger=ledger) == slow_tree(MODEL, ledger, params, K, SHAPE)


def test_a_repeated_round_has_the_same_answer_and_another_shape_is_refused() -> None:
    worker = Worker()
    worker.open()
    tree = worker.tree()
    (again,) = worker.ask()
    assert again.proposal == tree
    (refused,) = worker.ask(shape=TreeShape(3, 8))
    assert isinstance(refused.error, InvalidArgumentError)


def test_a_mode_that_judges_chains_only_refuses_trees() -> None:
    worker = Worker()
    worker.open(WARM, mode=AcceptanceMode.BLOCK)
    (refused,) = worker.ask()
    assert isinstance(refused.error, InvalidArgumentError)
    assert refused.error.field == "tree_width"
    worker.open(GREEDY, "t", mode=AcceptanceMode.BLOCK)  # at temperature 0 the target decides
    assert worker.tree(name="t").is_tree


def used(worker: Worker) -> int:
    return worker.runner.pool.used_blocks


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("how", ["close", "drop", "reopen", "next round"])
def test_nothing_of_a_tree_outlives_it(how: str, steps: int) -> None:
    worker = Worker()
    worker.open()
    worker.ask()
    for _ in range(steps):
        worker.it.step()
    match how:
        case "close":
            worker.it.handle(CloseSequence("s", 1), 0.0)
        case "drop":
            worker.it.drop("s")
        case "reopen":
            params = SequenceParams(GREEDY, AcceptanceMode.COUPLED, 3)
            worker.it.handle(OpenSequence("s", 2, PROMPT, params), 0.0)
        case "next round":
            ledger = (*PROMPT, 4)
            params = SequenceParams(GREEDY, AcceptanceMode.COUPLED, 3)
            tree = worker.tree(number=2, ledger=ledger)
            assert tree == slow_tree(MODEL, ledger, params, K, SHAPE)
            worker.it.handle(CloseSequence("s", 1), 0.0)
    assert worker.run() == []
    assert used(worker) == 0


def test_without_room_for_a_tree_a_chain_is_drawn() -> None:
    worker = Worker(num_blocks=2)
    worker.open(WARM)
    (answer,) = [*worker.ask(), *worker.run()]
    own = [*PROMPT]
    for _ in range(K):
        own.append(own_choice(MODEL, own, WARM, len(PROMPT)))
    assert not answer.proposal.is_tree
    assert answer.proposal.token_ids == (*own[3:],)


def test_a_round_takes_the_room_of_trees_that_are_only_kept() -> None:
    worker = Worker(num_blocks=5)
    worker.open(GREEDY, "a")
    params = worker.open(WARM, "b")
    worker.tree(name="a")
    before = used(worker)
    assert worker.tree(name="b") == slow_tree(MODEL, PROMPT, params, K, SHAPE)
    assert used(worker) == before + 1, "the first one's tree gave way"


def test_a_tree_that_loses_its_room_is_sent_as_it_stands() -> None:
    worker = Worker(num_blocks=6)
    params = worker.open(GREEDY, "a")
    worker.open(WARM, "b")
    worker.ask("a")
    worker.it.step()
    long = (*PROMPT, *[i % VOCAB for i in range(14)])
    worker.ask("b", ledger=long)
    events = worker.it.step()
    (answer,) = (event for event in events if event.sequence_id == "a")
    whole = slow_tree(MODEL, PROMPT, params, 2, SHAPE)
    assert same(answer.proposal, whole)
    assert [e.sequence_id for e in worker.run()] == ["b"]


def test_a_broken_row_ends_its_node_only() -> None:
    worker = Worker()
    params = worker.open()
    best = slow_tree(MODEL, PROMPT, params, K, SHAPE)
    first = (*PROMPT, best.token_ids[0])
    worker.runner.spoil = lambda prefix: tuple(prefix[: len(first)]) == first
    tree = worker.tree()
    assert tree.token_ids[0] == best.token_ids[0], "it was ranked by a sound row"
    assert 0 not in tree.parents
    assert tree.depth > 1
    worker.runner.passes.clear()
    worker.runner.spoil = lambda prefix: False
    ledger = (*first, 5)
    assert worker.tree(number=2, ledger=ledger) == slow_tree(MODEL, ledger, params, K, SHAPE)
    assert worker.runner.passes[0] == 2, "the entry of the broken row is not used"


def test_a_broken_root_ends_the_round() -> None:
    worker = Worker()
    worker.open()
    worker.runner.spoil = lambda prefix: True
    (failed,) = [*worker.ask(), *worker.run()]
    assert isinstance(failed, SequenceFailed)
    worker.it.handle(CloseSequence("s", 1), 0.0)
    assert used(worker) == 0


def test_a_failing_pass_costs_the_rest_of_one_tree(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    params = {name: worker.open(sampling, name) for name, sampling in (("a", GREEDY), ("b", WARM))}
    worker.ask("a")
    worker.ask("b")
    forward = worker.runner.forward_branches

    def failing(inputs: Any) -> torch.Tensor:
        held = worker.it.sequences.find("a")
        if any(item.branch.of.trunk is held.table for item in inputs):
            raise RuntimeError("no")
        return forward(inputs)

    worker.runner.forward_branches = failing  # type: ignore[method-assign]
    answers = {event.sequence_id: event.proposal for event in worker.run()}
    assert same(answers["a"], slow_tree(MODEL, PROMPT, params["a"], 1, SHAPE))
    assert answers["b"] == slow_tree(MODEL, PROMPT, params["b"], K, SHAPE)
    assert "growing" in caplog.text


def test_an_entry_that_cannot_be_adopted_is_fed_again(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    params = worker.open()
    tree = worker.tree()

    def failing(branch: Any) -> None:
        branch.of.trunk.truncate_to(branch.kept)
        raise RuntimeError("no")

    worker.runner.adopt = failing  # type: ignore[method-assign]
    ledger = (*PROMPT, tree.token_ids[0], 5)
    assert worker.tree(number=2, ledger=ledger) == slow_tree(MODEL, ledger, params, K, SHAPE)


def test_a_tree_near_the_models_length_is_refused() -> None:
    worker = Worker(max_model_len=5)
    worker.open()
    (refused,) = worker.ask(k=4)
    assert refused.error.field == "num_draft_tokens"
    assert worker.tree(k=3).depth == 3
    assert worker.runner.longest_branch <= 5


def test_every_worker_says_that_it_takes_trees() -> None:
    assert Worker().it.max_tree_nodes == 64


def test_values_are_those_of_the_softmax_with_noise() -> None:
    """The order of nodes is by value, not by score + noise."""
    worker = Worker()
    params = worker.open(WARM)
    tree = worker.tree(shape=TreeShape(3, 12))
    expected = slow_tree(MODEL, PROMPT, params, K, TreeShape(3, 12))
    assert tree == expected
    assert np.all(np.array(tree.parents) < np.arange(tree.num_draft_tokens))


RATIOS = AcceptanceMode.REJECTION


@pytest.mark.parametrize("draft_index", [0, 2])
@pytest.mark.parametrize("shape", [TreeShape(2, 5), SHAPE, TreeShape(6, 30), TreeShape(2, 1)])
def test_a_drawn_tree_is_drawn_from_what_is_sent(shape: TreeShape, draft_index: int) -> None:
    for seed in range(5):
        worker = Worker()
        sampling = SamplingParams(temperature=0.9, seed=seed)
        params = worker.open(sampling, mode=RATIOS, draft_index=draft_index)
        tree = worker.tree(shape=shape)
        check_slow_tries(MODEL, PROMPT, params, tree, 0.9)
        assert 1 <= tree.num_draft_tokens <= shape.nodes
        assert tree.depth == min(K, shape.nodes)
        assert max(map(tree.parents.count, range(-1, tree.num_draft_tokens))) <= shape.width


def test_drafts_of_one_sequence_draw_different_trees() -> None:
    trees = set()
    for draft_index in range(4):
        worker = Worker()
        worker.open(WARM, mode=RATIOS, draft_index=draft_index)
        trees.add(worker.tree().token_ids)
    assert len(trees) == 4


def test_trees_of_all_modes_share_passes() -> None:
    worker = Worker()
    drawn = worker.open(WARM, "drawn", mode=RATIOS)
    ranked = {name: worker.open(sampling, name) for name, sampling in SAMPLINGS.items()}
    for name in ("greedy", "drawn", "warm"):
        worker.ask(name)
    answers = {event.sequence_id: event.proposal for event in worker.run()}
    check_slow_tries(MODEL, PROMPT, drawn, answers["drawn"], 0.9)
    assert {name: answers[name] for name in ranked} == {
        name: slow_tree(MODEL, PROMPT, params, K, SHAPE) for name, params in ranked.items()
    }
    assert len(worker.runner.passes) == K


def test_drawn_tokens_that_were_accepted_are_not_fed_again() -> None:
    worker = Worker()
    params = worker.open(WARM, mode=RATIOS)
    tree = worker.tree()
    node = tree.parents.index(max(tree.parents))
    accepted = [tree.token_ids[i] for i in tree.path_to(node)[:-1]]
    ledger = (*PROMPT, *accepted, 0)
    worker.runner.passes.clear()
    check_slow_tries(MODEL, ledger, params, worker.tree(number=2, ledger=ledger), 0.9)
    assert len(accepted) > 1
    assert worker.runner.passes[0] == 1
    assert worker.cached() == [*ledger]


def test_drawn_tokens_stay_where_a_row_is_broken() -> None:
    """Which rows break may depend on what was drawn: dropping the tree would bias what is sent of others."""
    worker = Worker()
    worker.open(WARM, mode=RATIOS)
    whole = worker.tree()
    other = Worker()
    other.open(WARM, mode=RATIOS)
    other.runner.spoil = lambda prefix: len(prefix) > len(PROMPT)
    sent = other.tree()
    assert sent.depth == 1
    count = sent.num_draft_tokens
    assert sent == Proposal(whole.token_ids[:count], whole.parents[:count], whole.distributions[:count])
    assert whole.parents[count] != -1


def test_without_room_a_chain_is_drawn_as_it_would_be_without_trees() -> None:
    worker, other = Worker(num_blocks=2), Worker()
    for one in (worker, other):
        one.open(WARM, mode=RATIOS)
    (answer,) = [*worker.ask(), *worker.run()]
    (chain,) = [*other.ask(shape=TreeShape()), *other.run()]
    assert answer.proposal == chain.proposal
    assert not answer.proposal.is_tree


DRAFTED = (5, 6, 5, 6, 7, 5, 6)


def tree_of(name: str, mode: AcceptanceMode, ledger: tuple[int, ...]) -> Proposal:
    """Of a drafter of the registry."""
    drafter = registered(name)
    config = DraftConfig(model="embedded:draft", drafter=name)
    it = DraftEngine(drafter, config, vocabulary_size=2048, max_model_len=60, clock=ManualClock())
    sampling = SamplingParams(temperature=0.9, seed=3)
    it.handle(OpenSequence("s", 1, ledger, SequenceParams(sampling, mode, 3)), 0.0)
    events = it.handle(DraftRound("s", 1, 1, len(ledger), (), 3, shape=TreeShape(3, 9)), 0.0)
    while not events:
        events = it.step()
    it.handle(CloseSequence("s", 1), 0.0)
    (event,) = events
    assert isinstance(event, DraftProposal)
    return event.proposal


@pytest.mark.parametrize("mode", [AcceptanceMode.COUPLED, RATIOS])
@pytest.mark.parametrize("name", [*DRAFTERS, "stacked:ngram+bigram"])
def test_every_drafter_proposes_trees(name: str, mode: AcceptanceMode) -> None:
    """A node's first child is what the same drafter says after a ledger with the node's path."""
    tree = tree_of(name, mode, DRAFTED)
    for node, parent in enumerate(tree.parents):
        if parent in tree.parents[:node]:
            continue  # a later sibling
        path = (*(tree.token_ids[i] for i in tree.path_to(node)[:-1]),)
        alone = tree_of(name, mode, (*DRAFTED, *path))
        if mode is AcceptanceMode.COUPLED:
            assert alone.token_ids[0] == tree.token_ids[node]
        else:
            assert alone.distributions[0] == tree.distributions[node]


def test_a_sub_drafter_is_not_asked_for_a_tree() -> None:
    worker = Worker(sub_drafter="prompt-lookup")
    params = worker.open(WARM)
    ledger = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    assert worker.tree(ledger=ledger) == slow_tree(MODEL, ledger, params, K, SHAPE)
    assert worker.runner.passes[0] == len(ledger), "nothing guessed is fed"
