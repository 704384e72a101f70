"""Chain or tree: what a sequence does with the controller's arm, and what its trees teach."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from coordinator.speculation.arms import DraftArm
from coordinator.speculation.controller import Controller
from coordinator.speculation.exploration import Exploration
from coordinator.speculation.policy import FixedLength, GoodputPolicy, Policy, Verification
from paceline.core.types import CHAIN, Proposal, TreeShape, Verdict
from tests.sim.rounds import accepting, chain, following, tree

MOST, NODES = 8, 32
RATE, RANKS = 0.6, (0.4, 0.2, 0.1)
TREES = TreeShape(4, NODES)


def experienced(row: float, step: float = 0.001) -> Controller:
    """A controller that has measured all arms, and begins no trial."""
    controller = Controller(MOST, NODES)
    for arm in controller.arms.each:
        for _ in range(50):
            controller.costs.add(arm, step * arm.depth, 0.01 + row * arm.rows, 1)
    controller._explorations[0] = Exploration(due=10**9)
    return controller


def judged(proposal: Proposal, rng: random.Random) -> Verdict:
    """A verdict on text whose tokens have the ranks RATE and RANKS."""
    if not proposal.is_tree:
        rates = (rng.random() < RATE for _ in proposal.token_ids)
        return accepting(next((i for i, right in enumerate(rates) if not right), proposal.depth))
    path, at = list[int](), -1
    while children := [node for node, parent in enumerate(proposal.parents) if parent == at]:
        rank = rng.choices(range(5), (RATE, *((1 - RATE) * share for share in (*RANKS, 0.3))))[0]
        if rank >= len(children):
            break
        at = children[rank]
        path.append(at)
    return following(tuple(path))


def run(
    policy: Policy, rounds: int, draft: Callable[[int, TreeShape], Proposal] | None = None
) -> list[Proposal]:
    rng, sent = random.Random(1), []
    for _ in range(rounds):
        k = policy.choose(MOST, 0, 1000)
        proposal = chain(k)
        if k and not policy.shape(k).is_chain:
            proposal = draft(k, policy.shape(k)) if draft else tree(RATE, RANKS, k, policy.shape(k))
        if k:
            policy.on_draft_request(0)
            policy.on_proposal(proposal, 0.001 * k, 0)
        policy.on_verify(proposal, prefills=False)
        policy.on_verdict(proposal, judged(proposal, rng), Verification(0.01))
        sent.append(proposal)
    return sent


def auto(controller: Controller) -> GoodputPolicy:
    return GoodputPolicy(controller, MOST, tree=TREES)


def test_trees_are_drafted_where_rows_are_free() -> None:
    sent = run(auto(experienced(row=0.0)), 300)[-1]
    assert sent.is_tree
    assert sent.num_draft_tokens == NODES


@pytest.mark.parametrize(("row", "depth"), [(0.002, 1), (0.02, 0)])
def test_where_rows_cost_chains_or_nothing_is_drafted(row: float, depth: int) -> None:
    """The costs are as experienced: rounds are not measured anew."""
    controller = experienced(row)
    policy = auto(controller)
    for _ in range(300):
        policy.on_verify(chain(policy.choose(MOST, 0, 1000)), prefills=False)
        policy.on_verdict(chain(0), accepting(0), None)
    assert not controller.arms.each[controller.arm].nodes
    assert controller.arm >= depth


def test_a_sequence_of_trees_alone_drafts_no_chain() -> None:
    policy = GoodputPolicy(experienced(row=0.0), MOST, tree=TreeShape(3, 20), draws_chains=False)
    sent = run(policy, 100)
    assert all(proposal.is_tree or not proposal.token_ids for proposal in sent)
    assert sent[-1].num_draft_tokens == 20
    assert max(map(sent[-1].parents.count, range(-1, 20))) <= 3


def test_sequences_draft_what_they_may_whatever_the_controller_does() -> None:
    controller = experienced(row=0.0)
    chains = GoodputPolicy(controller, MOST)
    trees = GoodputPolicy(controller, MOST, tree=TreeShape(2, 9), draws_chains=False)
    controller.arm = controller.arms.nearest(DraftArm(4, 16))
    assert (chains.choose(MOST, 0, 1000), chains.shape(4)) == (4, CHAIN)
    assert (trees.choose(MOST, 0, 1000), trees.shape(4)) == (4, TreeShape(2, 9))
    controller.arm = 3
    assert (chains.choose(MOST, 0, 1000), chains.shape(3)) == (3, CHAIN)
    assert (trees.choose(MOST, 0, 1000), trees.shape(4)) == (4, TreeShape(2, 8))
    assert trees.choose(2, 0, 1000) == 2


def test_sequences_of_one_kind_only_try_nothing_else() -> None:
    for policy, shape in ((GoodputPolicy, CHAIN), (GoodputPolicy, TREES)):
        controller = Controller(MOST, NODES)
        sent = run(policy(controller, MOST, tree=shape, draws_chains=shape.is_chain), 200)
        drafted = [proposal for proposal in sent if proposal.token_ids]
        assert drafted
        assert all(proposal.is_tree != shape.is_chain for proposal in drafted)


def test_a_fixed_tree_stays_and_teaches_what_trees_and_chains_bring() -> None:
    controller = experienced(row=0.0)
    fixed = FixedLength(controller, 4, tree=TreeShape(4, 16))
    sent = run(fixed, 600)
    assert {(proposal.depth, proposal.num_draft_tokens) for proposal in sent} == {(4, 16)}
    expected = auto(controller).drafts.expected()
    assert expected[4] == pytest.approx(2.31, rel=0.1)
    assert expected[controller.arms.nearest(DraftArm(4, 16))] == pytest.approx(3.12, rel=0.1)
    assert controller.round_seconds[controller.arms.nearest(DraftArm(4, 16))] == pytest.approx(
        0.014, rel=0.05
    )


def test_a_draft_that_answers_with_chains_is_no_better_than_a_chain() -> None:
    controller = experienced(row=0.0)
    run(FixedLength(controller, 4, tree=TreeShape(4, 16)), 600, lambda k, _: chain(k))
    expected = auto(controller).drafts.expected()
    assert expected[controller.arms.nearest(DraftArm(4, 16))] == pytest.approx(expected[4], rel=0.1)


def test_a_tree_of_several_drafts_chains_counts_as_a_better_chain() -> None:
    """The rounds were asked for as chains."""
    controller = experienced(row=0.0)
    policy = FixedLength(controller, 2)
    for _ in range(300):
        policy.choose(MOST, 0, 1000)
        merged = Proposal((1, 2, 3, 4), (-1, 0, -1, 2))
        policy.on_verify(merged, prefills=False)
        policy.on_verdict(merged, following((2, 3)), Verification(0.01))
    assert policy.drafts.chain.expected(2)[2] > 2.8
