"""Trees judged by the rules: the enumerated decisions, on a CPU and as on a device; and bugs in them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from paceline.decoding import tree_batch, trees
from paceline.decoding.noise import Purpose, uniforms
from target_worker import verify
from target_worker.acceptance import coupled, ratios, tree_ratios
from target_worker.acceptance.items import VerifyItem
from target_worker.verify import judge_all, verify_items
from tests.sim.reference import slow_tree_verdict
from tests.sim.toys import ToyModel, own_choice
from tests.unit.decoding.test_tree_laws import LOSSLESS, Model, decided
from tests.unit.decoding.tree_laws import Row, Try, drawn, merged, point

WAYS = ["cpu", "device"]


def judge_on(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Take the way of a CPU, or that of a device, on the CPU."""
    for module in (verify, ratios, tree_ratios):
        monkeypatch.setattr(module, "on_host", lambda tensor: where == "cpu")


def sent(q: Row) -> SparseDistribution:
    ids = [token for token, value in enumerate(q) if value]
    values = np.array([float(q[token]) for token in ids], dtype="<f4")
    return SparseDistribution(np.array(ids, dtype="<u4").tobytes(), values.tobytes())


def logits_of(row: Row) -> list[float]:
    return [math.log(value) if value else -math.inf for value in row]


def item_of(tries: Sequence[Try], seed: int) -> VerifyItem:
    token_ids, parents, nodes = merged(tries)
    proposal = Proposal(tuple(token_ids), tuple(parents), tuple(sent(each.q) for each in tries), tuple(nodes))
    params = SequenceParams(SamplingParams(seed=seed), AcceptanceMode.REJECTION, 1)
    return VerifyItem(params, [0] * (1 + seed % 5), proposal)


def rows_of(item: VerifyItem, p: Model) -> Tensor:
    proposal = item.proposal
    paths = [proposal.path_to(node) for node in range(-1, proposal.num_draft_tokens)]
    texts = [tuple(proposal.token_ids[node] for node in path) for path in paths]
    return torch.tensor([logits_of(p(text)) for text in texts])


def check_enumerated(name: str, count: int = 30) -> None:
    """Trees that the strategy may draw, judged together with chains: decisions are those of the recursion."""
    strategy, p, _ = LOSSLESS[name]
    found = [tries for _, tries in drawn(strategy) if tries]
    rng = random.Random(name)
    chosen = [rng.choice(found) for _ in range(count)]
    items = [item_of(tries, seed) for seed, tries in enumerate(chosen)]
    chain = VerifyItem(items[0].params, [0], Proposal((0, 1)))
    rows = [rows_of(item, p) for item in items]
    of_chain = rows_of(VerifyItem(chain.params, [0], Proposal((0, 1), (-1, 0))), p)
    logits = torch.cat([rows[0], of_chain, *rows[1:]])
    outcomes = verify_items([items[0], chain, *items[1:]], logits, logits)
    del outcomes[1]
    for seed, (item, tries, outcome) in enumerate(zip(items, chosen, outcomes, strict=True)):
        place = [seed], [len(item.ledger)]
        tests = uniforms(*place, Purpose.ACCEPT_TEST, len(tries))[0].tolist()
        path, token = decided(tries, p, tests, float(uniforms(*place, Purpose.NEXT_TOKEN, 1)))
        assert outcome is not None
        assert (item.proposal.accepted(outcome), outcome.next_token) == (path, token)
        assert outcome.num_accepted == len(path)


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_decisions_are_the_enumerated_ones(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_on(monkeypatch, where)
    check_enumerated(name)


@pytest.mark.parametrize("where", WAYS)
def test_a_tree_without_distributions_has_point_masses(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_on(monkeypatch, where)
    rng, model = random.Random(1), Model(3, 4)
    for seed in range(40):
        tries = [Try((), token, point(token, 4)) for token in rng.sample(range(4), 3)]
        item = item_of(tries, seed)
        bare = VerifyItem(item.params, item.ledger, Proposal(item.proposal.token_ids, item.proposal.parents))
        logits = rows_of(item, model)
        assert verify_items([bare], logits, logits) == verify_items([item], logits, logits)


@pytest.mark.parametrize("where", WAYS)
def test_nothing_behind_an_accepted_node_ends_the_path_with_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chain, and with a sibling: the accepted token is the next one, in ratio modes."""
    judge_on(monkeypatch, where)
    params = SequenceParams(SamplingParams(seed=1), AcceptanceMode.REJECTION, 1)
    proposal = Proposal((1, 2, 0), (-1, 0, -1))
    logits = torch.full((4, 3), -40.0)
    logits[0, 1] = logits[1, 2] = 0.0
    allowed = logits.clone()
    allowed[2] = -torch.inf
    assert verify_items([VerifyItem(params, [0], proposal)], logits, allowed) == [Outcome(1, 2, 0)]
    allowed[1] = -torch.inf
    assert verify_items([VerifyItem(params, [0], proposal)], logits, allowed) == [Outcome(0, 1)]
    allowed[0] = -torch.inf
    assert verify_items([VerifyItem(params, [0], proposal)], logits, allowed) == [None]


@pytest.mark.parametrize("mode", [mode for mode in AcceptanceMode if mode.facts.takes_trees])
def test_a_rule_with_trees_does_not_wait_for_the_device(mode: AcceptanceMode) -> None:
    params = SequenceParams(SamplingParams(seed=1), mode, 1)
    tries = (0, 1, 0, 2) if mode.facts.needs_q else ()
    items = [
        VerifyItem(params, [0], Proposal((1, 2, 3), (-1, -1, 0), (), tries)),
        VerifyItem(params, [0], Proposal((1, 2))),
        VerifyItem(params, [0], Proposal()),
    ]
    logits = torch.empty(sum(item.rows for item in items), 7, device="meta")
    assert judge_all(items, logits, ()).numbers.device.type == "meta"


# ---- where the target decides ------------------------------------------------------------------------

VOCAB = 6
TOY = ToyModel(VOCAB, seed=4)


def random_tree(rng: random.Random, ledger: Sequence[int], sampling: SamplingParams) -> Proposal:
    """Many nodes are the target's own choices."""
    token_ids, parents, texts = list[int](), list[int](), {-1: list(ledger)}
    for _ in range(rng.randint(1, 9)):
        parent = rng.randrange(-1, len(token_ids))
        token = own_choice(TOY, texts[parent], sampling, 1) if rng.random() < 0.6 else rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, token_ids, strict=True):
            texts[len(token_ids)] = [*texts[parent], token]
            token_ids.append(token)
            parents.append(parent)
    return Proposal(tuple(token_ids), tuple(parents))


def check_own_choices(temperature: float) -> None:
    """The short way, that of tensors, and one token at a time."""
    rng, depths = random.Random(2), set()
    for seed in range(60):
        sampling = SamplingParams(seed=seed, temperature=temperature)
        params = SequenceParams(sampling, AcceptanceMode.COUPLED, 1)
        items = []
        for _ in range(3):
            ledger = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            items.append(VerifyItem(params, ledger, random_tree(rng, ledger, sampling)))
        items[1] = VerifyItem(params, items[1].ledger, Proposal(items[1].proposal.token_ids))
        logits = torch.cat([toy_rows(item) for item in items])
        outcomes = verify_items(items, logits, logits)
        assert outcomes == verify_items(items, logits, logits.clone())
        for item, outcome in zip(items, outcomes, strict=True):
            if item.proposal.is_tree and outcome is not None:
                path, token = slow_tree_verdict(TOY, item.ledger, params, item.proposal)
                assert outcome == Outcome(len(path), token, path[-1] if path else None)
                depths.add(len(path))
    assert len(depths) > 2


def toy_rows(item: VerifyItem) -> Tensor:
    proposal = item.proposal
    if not proposal.is_tree:
        return torch.from_numpy(TOY.rows([*item.ledger, *proposal.token_ids], item.rows))
    paths = [proposal.path_to(node) for node in range(-1, proposal.num_draft_tokens)]
    texts = [[*item.ledger, *(proposal.token_ids[node] for node in path)] for path in paths]
    return torch.from_numpy(np.stack([TOY.logits(text) for text in texts]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_path_is_that_of_plain_decoding(temperature: float) -> None:
    check_own_choices(temperature)


# ---- bugs --------------------------------------------------------------------------------------------


def one_q_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries that share a node are judged as one, with the first one's q."""

    def merged_tries(item: VerifyItem) -> Sequence[int]:
        return range(item.num_draft)

    monkeypatch.setattr(tree_ratios, "tries_of", merged_tries)


def nothing_taken_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection leaves p as it was."""
    for module in (trees, tree_batch):
        monkeypatch.setattr(module, "RESIDUAL_FLOOR", 2.0)


@pytest.mark.planted
@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (one_q_a_node, "three drafts"),
        (nothing_taken_from_p, "two drafts"),
        (nothing_taken_from_p, "chains of two drafts"),
    ],
)
def test_a_wrong_decision_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_on(monkeypatch, where)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_enumerated(name, 200)


@pytest.mark.planted
def test_siblings_judged_with_the_first_ones_q_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn without replacement, their q must be renormalised over what the earlier ones left."""
    made = item_of

    def with_first_q(tries: Sequence[Try], seed: int) -> VerifyItem:
        first = {each.after: each.q for each in reversed(tries)}
        return made([Try(each.after, each.token, first[each.after]) for each in tries], seed)

    monkeypatch.setitem(globals(), "item_of", with_first_q)
    with pytest.raises(AssertionError):
        check_enumerated("(-1, -1, -1) without replacement", 60)


@pytest.mark.planted
def test_the_longest_match_is_not_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deepest node that is the target's choice after its parent, whether or not that one is."""

    def longest(token_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
        of = Proposal(tuple(token_ids), tuple(parents))
        right = [n for n, parent in enumerate(parents) if token_ids[n] == choices[parent + 1]]
        return list(max((of.path_to(node) for node in right), key=len, default=()))

    monkeypatch.setattr(coupled, "follow", longest)
    with pytest.raises(AssertionError):
        check_own_choices(1.0)


@pytest.mark.planted
def test_noise_by_row_instead_of_depth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifyItem, "depths", property(lambda item: range(item.rows)))
    with pytest.raises(AssertionError):
        check_own_choices(1.0)
