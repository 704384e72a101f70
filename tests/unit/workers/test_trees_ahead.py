"""Trees drafted ahead: for the rest of the pool by value, and as they would be drafted after the verdict."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paceline.core.clock import ManualClock
from paceline.core.messages import CloseSequence, Continuations, DraftProposal, DraftRound, OpenSequence
from paceline.core.types import AcceptanceMode, Outcome, Proposal, SamplingParams, SequenceParams, TreeShape
from tests.sim.reference import slow_tree
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, own_choice

VOCAB = 6
MODEL = ToyModel(VOCAB, seed=4, sharpness=2.0)
PROMPT = (1, 2, 3)
SAMPLINGS = {"greedy": SamplingParams(temperature=0, seed=1), "warm": SamplingParams(temperature=0.9, seed=3)}
SHAPE = TreeShape(2, 4)
K = 3


class Worker:
    """A draft that looks ahead, one sequence."""

    def __init__(self, branches: int = 8, num_blocks: int = 200, max_model_len: int = 60) -> None:
        self.runner = ToyRunner(MODEL, num_blocks, 4)
        self.it = draft_engine(
            self.runner,
            draft_config(lookahead_branches=branches, max_sequences=4),
            vocabulary_size=VOCAB,
            max_model_len=max_model_len,
            clock=ManualClock(),
        )

    def open(self, name: str, mode: AcceptanceMode = AcceptanceMode.COUPLED) -> SequenceParams:
        params = SequenceParams(SAMPLINGS[name], mode, len(PROMPT))
        assert not self.it.handle(OpenSequence("s", 1, PROMPT, params), 0.0)
        return params

    def ask(self, number: int, ledger: tuple[int, ...], **rest: Any) -> list[Any]:
        rest = {"shape": SHAPE, "num_draft_tokens": K} | rest
        return list(self.it.handle(DraftRound("s", 1, number, len(ledger), ledger, **rest), 0.0))

    def run(self, steps: int | None = None) -> list[Any]:
        events: list[Any] = []
        for _ in itertools.count() if steps is None else range(steps):
            if not self.it.has_work:
                break
            events += self.it.step()
        return events


def split(events: list[Any]) -> tuple[Proposal, dict[Outcome, Proposal]]:
    """The answer, and what was drafted ahead."""
    (answer,) = (event for event in events if isinstance(event, DraftProposal))
    return answer.proposal, ahead(events)


def ahead(events: list[Any]) -> dict[Outcome, Proposal]:
    found: dict[Outcome, Proposal] = {}
    for event in events:
        if isinstance(event, Continuations):
            assert not found.keys() & event.proposals.keys(), "each is sent once"
            found |= event.proposals
    return found


def after(ledger: tuple[int, ...], tree: Proposal, outcome: Outcome) -> tuple[int, ...]:
    """The ledger that a verdict leads to."""
    return (*ledger, *tree.accepted(outcome), outcome.next_token)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_tree_drafted_ahead_is_the_one_after_its_verdict(name: str) -> None:
    worker = Worker()
    params = worker.open(name)
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    assert tree == slow_tree(MODEL, PROMPT, params, K, SHAPE)
    assert 2 <= len(found) <= 8
    for outcome, proposal in found.items():
        assert len(tree.accepted(outcome)) == outcome.num_accepted
        assert (outcome.last_node is None) == (outcome.num_accepted == 0)
        parent = -1 if outcome.last_node is None else outcome.last_node
        taken = [t for t, above in zip(tree.token_ids, tree.parents, strict=True) if above == parent]
        assert outcome.next_token not in taken, "that token would be accepted"
        assert proposal == slow_tree(MODEL, after(PROMPT, tree, outcome), params, K, SHAPE)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_likeliest_outcomes_have_trees(name: str) -> None:
    """They are the best paths that leave the tree, of all that there are."""
    worker = Worker(branches=3)
    params = worker.open(name)
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    whole = slow_tree(MODEL, PROMPT, params, K + 1, TreeShape(VOCAB, 2000), beam=1000)
    sent = {(*(tree.token_ids[i] for i in tree.path_to(n)),) for n in range(tree.num_draft_tokens)}
    leaving = []
    for node in range(whole.num_draft_tokens):
        path = (*(whole.token_ids[i] for i in whole.path_to(node)),)
        if path not in sent and (path[:-1] in sent or len(path) == 1):
            leaving.append(path)
    assert {(*tree.accepted(o), o.next_token) for o in found} == set(leaving[: len(found)])
    assert found


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_hit_needs_no_pass_and_goes_on(name: str, known: bool) -> None:
    worker = Worker()
    params, ledger = worker.open(name), PROMPT
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    for number in range(2, 5):
        outcome, expected = next(iter(found.items()))
        ledger = after(ledger, tree, outcome)
        worker.runner.passes.clear()
        answers = worker.ask(number, ledger, proposal_known=known)
        assert [a.proposal for a in answers] == ([] if known else [expected])
        assert worker.runner.passes == []
        tree, found = expected, ahead(worker.run())
        for outcome, proposal in found.items():
            assert proposal == slow_tree(MODEL, after(ledger, tree, outcome), params, K, SHAPE)
    assert worker.it.lookahead.hits == 3
    worker.it.handle(CloseSequence("s", 1), 0.0)
    assert worker.runner.pool.used_blocks == 0


@pytest.mark.parametrize("steps", range(K, K + 9))
def test_a_hit_in_the_middle_goes_on_where_it_was(steps: int) -> None:
    whole = Worker()
    whole.open("warm")
    tree, found = split([*whole.ask(1, PROMPT), *whole.run()])
    for outcome in found:
        worker = Worker()
        params, ledger = worker.open("warm"), after(PROMPT, tree, outcome)
        worker.ask(1, PROMPT)
        worker.run(steps)
        again, _ = split([*worker.ask(2, ledger), *worker.run()])
        assert again == slow_tree(MODEL, ledger, params, K, SHAPE)
        worker.it.handle(CloseSequence("s", 1), 0.0)
        assert worker.runner.pool.used_blocks == 0


def test_a_miss_is_drafted_as_ever() -> None:
    worker = Worker()
    params = worker.open("warm")
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    known = {after(PROMPT, tree, outcome) for outcome in found}
    ledger = next(
        ledger for ledger in ((*PROMPT, tree.token_ids[0], t) for t in range(VOCAB)) if ledger not in known
    )
    again, _ = split([*worker.ask(2, ledger), *worker.run()])
    assert again == slow_tree(MODEL, ledger, params, K, SHAPE)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_tree_that_is_cut_is_cut_as_the_coordinator_cuts(k: int) -> None:
    """Nodes before the first one that is too deep: `Outcome.last_node` then means the same on both sides."""
    worker = Worker()
    params = worker.open("warm")
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    outcome, whole = next(iter(found.items()))
    ledger = after(PROMPT, tree, outcome)
    (answer,) = worker.ask(2, ledger, num_draft_tokens=k)
    cut = answer.proposal
    assert cut == whole.first(cut.num_draft_tokens)
    assert cut.depth <= k
    if cut != whole:
        assert whole.first(cut.num_draft_tokens + 1).depth == k + 1
    for following, proposal in ahead(worker.run()).items():
        after_it = after(ledger, cut, following)
        assert proposal == slow_tree(MODEL, after_it, params, k, SHAPE)


def test_another_shape_is_drafted_anew() -> None:
    worker = Worker()
    params = worker.open("warm")
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    ledger = after(PROMPT, tree, next(iter(found)))
    again, _ = split([*worker.ask(2, ledger, shape=TreeShape(2, 5)), *worker.run()])
    assert again == slow_tree(MODEL, ledger, params, K, TreeShape(2, 5))


def test_a_chain_after_a_tree_uses_none() -> None:
    worker = Worker()
    worker.open("warm")
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
    ledger = after(PROMPT, tree, next(iter(found)))
    events = [*worker.ask(2, ledger, shape=TreeShape()), *worker.run()]
    (answer,) = (event for event in events if isinstance(event, DraftProposal))
    assert not answer.proposal.is_tree
    assert answer.proposal.token_ids[0] == own_choice(MODEL, ledger, SAMPLINGS["warm"], len(PROMPT))


def test_a_round_without_lookahead_has_none() -> None:
    worker = Worker()
    worker.open("warm")
    _, found = split([*worker.ask(1, PROMPT, no_lookahead=True), *worker.run()])
    assert found == {}


def test_drawn_trees_are_not_drafted_ahead() -> None:
    worker = Worker()
    worker.open("warm", AcceptanceMode.REJECTION)
    _, found = split([*worker.ask(1, PROMPT), *worker.run()])
    assert found == {}


def test_the_depth_ahead_is_the_one_asked_for() -> None:
    worker = Worker()
    params = worker.open("greedy")
    tree, found = split([*worker.ask(1, PROMPT, num_lookahead_tokens=2), *worker.run()])
    for outcome, proposal in found.items():
        assert proposal == slow_tree(MODEL, after(PROMPT, tree, outcome), params, 2, SHAPE)
    assert found


def test_without_lookahead_or_room_nothing_is_drafted_ahead() -> None:
    for worker in (Worker(branches=0), Worker(num_blocks=5), Worker(max_model_len=9)):
        params = worker.open("warm")
        tree, found = split([*worker.ask(1, PROMPT), *worker.run()])
        assert tree == slow_tree(MODEL, PROMPT, params, K, SHAPE)
        assert found == {}
        assert worker.runner.longest_branch <= 9


def test_a_failing_pass_ahead_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    params = worker.open("warm")
    worker.ask(1, PROMPT)
    events: list[Any] = []
    while not events:
        events = worker.it.step()
    worker.runner.crash_on = lambda token_ids: RuntimeError("no")
    assert ahead(worker.run()) == {}
    worker.runner.crash_on = lambda token_ids: None
    ledger = (*PROMPT, events[0].proposal.token_ids[0], 0)
    again, _ = split([*worker.ask(2, ledger), *worker.run()])
    assert again == slow_tree(MODEL, ledger, params, K, SHAPE)
    assert "ahead" in caplog.text


def test_a_row_that_is_no_distribution_ends_what_follows_it() -> None:
    worker = Worker()
    worker.open("warm")
    worker.ask(1, PROMPT)
    events: list[Any] = []
    while not events:
        events = worker.it.step()
    worker.runner.spoil = lambda prefix: True
    assert ahead(worker.run()) == {}


def test_a_tree_that_cannot_be_adopted_is_drafted_again() -> None:
    worker = Worker()
    params = worker.open("warm")
    tree, found = split([*worker.ask(1, PROMPT), *worker.run()])

    def failing(branch: Any) -> None:
        branch.of.trunk.truncate_to(branch.kept)
        raise RuntimeError("no")

    worker.runner.adopt = failing  # type: ignore[method-assign]
    ledger = after(PROMPT, tree, next(iter(found)))
    again, _ = split([*worker.ask(2, ledger), *worker.run()])
    assert again == slow_tree(MODEL, ledger, params, K, SHAPE)
    worker.it.handle(CloseSequence("s", 1), 0.0)
    assert worker.runner.pool.used_blocks == 0
