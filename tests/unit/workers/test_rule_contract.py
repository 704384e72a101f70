"""The contract of acceptance rules: every registered one keeps it, and wrong ones break it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from paceline.decoding.acceptance import Decision, _decision
from paceline.decoding.noise import Purpose
from target_worker import verify
from target_worker.acceptance.interface import AcceptanceRule, Pending, RuleOutcome, outcomes_of
from target_worker.acceptance.items import VerifyItem, starts_of
from target_worker.acceptance.noise import RoundNoise
from target_worker.acceptance.registry import RULES
from target_worker.verify import verify_items
from tests.unit.decoding.test_lossless_chains import Enumeration, Tables, normal

PROMPT = (0, 1)
EXACT, CAUGHT = 1e-9, 1e-3
DRAWN = [mode for mode in RULES if not mode.facts.shares_noise]
SHARED = [mode for mode in RULES if mode.facts.shares_noise]


def item(
    mode: AcceptanceMode,
    draft: Sequence[int],
    q: Sequence[Sequence[float]] = (),
    *,
    ledger: Sequence[int] = PROMPT,
    **sampling: Any,
) -> VerifyItem:
    """A round; `q` holds what each draft token was drawn from, none where it was not drawn."""
    params = SequenceParams(SamplingParams(**{"seed": 5, **sampling}), mode, len(PROMPT))
    return VerifyItem(params, ledger, Proposal(tuple(draft), (), tuple(map(sent, q))))


def sent(weights: Sequence[float]) -> SparseDistribution:
    """In its closed form where it is uniform."""
    q = np.asarray(weights)
    if (q == q[0]).all():
        return SparseDistribution(uniform_over=len(q))
    return SparseDistribution(q.nonzero()[0].astype("<u4").tobytes(), q[q > 0].astype("<f4").tobytes())


def outcomes(rule: AcceptanceRule, items: Sequence[VerifyItem], scores: Tensor) -> list[RuleOutcome]:
    pending = rule.judge(items, scores, RoundNoise(items))
    return pending.read(pending.numbers.tolist())


# ---- the contract ----------------------------------------------------------------------------------


def check_form(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    """One outcome a round, within its proposal; numbers in one dimension, not read before the end."""
    items, scores = batch(mode)
    found = outcomes(rule, items, scores)
    assert len(found) == len(items)
    for one, outcome in zip(items, found, strict=True):
        assert 0 <= outcome.num_accepted <= one.num_draft
        assert outcome.next_token in range(scores.shape[1])
    elsewhere = torch.empty(scores.shape, device="meta")
    numbers = rule.judge(items, elsewhere, RoundNoise(items)).numbers
    assert (numbers.device.type, numbers.dtype, numbers.dim()) == ("meta", torch.int64, 1)


def check_alone(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    """A round's outcome does not depend on the others it is judged with."""
    items, scores = batch(mode)
    together = outcomes(rule, items, scores)
    for one, start, outcome in zip(items, starts_of(items), together, strict=True):
        assert outcomes(rule, [one], scores[start : start + one.rows]) == [outcome]


def check_nothing_left(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    """Where every token is impossible there is no next token, and no number stands for it."""
    (found,) = outcomes(rule, [item(mode, ())], torch.full((1, 4), -torch.inf))
    assert found == RuleOutcome(0, None)


def check_few(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    """A shortcut decides as the rule does, and refuses rows that are no distribution."""
    if rule.judge_few is None:
        return
    items, logits = batch(mode)
    assert rule.judge_few(items, logits) == outcomes(rule, items, logits)
    logits[starts_of(items)[1]] = torch.nan
    assert [i for i, o in enumerate(rule.judge_few(items, logits)) if o is None] == [1]


def check_own_choices(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    """With shared noise a round gives the tokens that plain rounds give one by one, whatever is drafted."""
    vocab, k = 3, 2
    tables = random_tables(vocab, k + 1)
    for seed, draft in itertools.product(range(8), itertools.product(range(vocab), repeat=k)):
        rows = torch.stack([row_after(tables, draft[:i]) for i in range(k + 1)])
        accepted, token, _ = outcomes(rule, [item(mode, draft, seed=seed)], rows)[0]
        assert token is not None
        spoken = (*draft[:accepted], token)
        for i, said in enumerate(spoken):
            plain = item(mode, (), ledger=(*PROMPT, *spoken[:i]), seed=seed)
            assert outcomes(rule, [plain], row_after(tables, spoken[:i])[None]) == [RuleOutcome(0, said)]


def error_of(mode: AcceptanceMode, rule: AcceptanceRule, q: Tables | None = None) -> float:
    """How far the law of the tokens is from the target's, by integrating over all uniforms of a round."""
    vocab, k = 3, 2
    scores = random_tables(vocab, k + 1)
    # As a rule has them: softmax of float32 scores. What is sent are float32, and sixteenths are exact there.
    p = [table.softmax(-1, dtype=torch.float64) for table in scores]
    q = [normal(table) for table in (sixteenths(vocab, k) if q is None else q)]
    return Enumeration(judged_by(mode, rule, p, scores), p, q).error


CHECKS: list[Callable[[AcceptanceMode, AcceptanceRule], None]] = [
    check_form,
    check_alone,
    check_nothing_left,
    check_few,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mode", RULES)
def test_a_rule_keeps_the_contract(mode: AcceptanceMode, check: Any) -> None:
    check(mode, RULES[mode])


@pytest.mark.parametrize("mode", [mode for mode in DRAWN if mode.facts.lossless])
def test_a_lossless_rule_keeps_the_distribution(mode: AcceptanceMode) -> None:
    assert error_of(mode, RULES[mode]) < EXACT


@pytest.mark.parametrize("mode", [mode for mode in DRAWN if mode.facts.lossless])
@pytest.mark.parametrize("changed", [(), (1,)])
def test_a_uniform_draft_keeps_the_distribution(mode: AcceptanceMode, changed: tuple[int, ...]) -> None:
    """In all positions, or in some only: the others have lists."""
    drawn = [torch.ones_like(table) for table in sixteenths(3, 2)]
    for level in changed:
        drawn[level] = sixteenths(3, 2)[level]
    assert error_of(mode, RULES[mode], drawn) < EXACT


@pytest.mark.parametrize("mode", SHARED)
def test_a_rule_with_shared_noise_gives_the_targets_choices(mode: AcceptanceMode) -> None:
    check_own_choices(mode, RULES[mode])


@pytest.mark.parametrize("host", [True, False])
def test_a_mixed_batch_equals_single_rounds_in_one_copy(host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes, sampled and greedy, in turn."""
    mixed = [made for made, _ in each_mode()]
    logits = torch.cat([rows for _, rows in each_mode()])
    copies: list[int] = []
    to_host = verify.to_host
    monkeypatch.setattr(verify, "on_host", lambda tensor: host)
    monkeypatch.setattr(verify, "to_host", lambda tensors: copies.append(1) or to_host(tensors))
    together = verify_items(mixed, logits, logits)
    assert copies == [1]
    assert together == [verify_items([made], rows, rows)[0] for made, rows in each_mode()]


def test_a_replaced_rule_judges_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the short and on the general way."""
    says = AcceptanceRule(lambda items, scores, noise: constant(items, 2))
    monkeypatch.setitem(RULES, AcceptanceMode.COUPLED, says)
    one, logits = item(AcceptanceMode.COUPLED, (1,)), torch.zeros(2, 4)
    for allowed in (logits, logits.clone()):
        assert verify_items([one], logits, allowed) == [Outcome(0, 2)]


# ---- wrong rules -----------------------------------------------------------------------------------


def constant(items: Sequence[VerifyItem], token: int) -> Pending:
    return Pending(torch.full((len(items),), token), lambda tokens: outcomes_of((0, t) for t in tokens))


Change = Callable[[Sequence[VerifyItem], list[RuleOutcome]], list[RuleOutcome]]


def wrong(change: Change, **facts: Any) -> list[tuple[AcceptanceMode, AcceptanceRule]]:
    """The rules of these modes with their outcomes changed."""
    modes = [m for m in RULES if all(getattr(m.facts, name) == value for name, value in facts.items())]

    def rule_of(mode: AcceptanceMode) -> AcceptanceRule:
        def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
            pending = RULES[mode].judge(items, scores, noise)
            return replace(pending, read=lambda numbers: change(items, pending.read(numbers)))

        return AcceptanceRule(judge)

    return [(mode, rule_of(mode)) for mode in modes]


def trusts_the_first(items: Sequence[VerifyItem], found: list[RuleOutcome]) -> list[RuleOutcome]:
    return [
        RuleOutcome(1, o.next_token) if i.num_draft and o.num_accepted == 0 else o
        for i, o in zip(items, found, strict=True)
    ]


def as_the_first(items: Sequence[VerifyItem], found: list[RuleOutcome]) -> list[RuleOutcome]:
    return [RuleOutcome(0, found[0].next_token) for _ in found]


@pytest.mark.planted
@pytest.mark.parametrize(("mode", "rule"), wrong(trusts_the_first, shares_noise=False))
def test_catches_a_rule_that_trusts_a_draft(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    assert error_of(mode, rule) > CAUGHT


@pytest.mark.planted
@pytest.mark.parametrize("mode", DRAWN)
def test_catches_a_rule_reusing_its_noise(mode: AcceptanceMode) -> None:
    """The next token is drawn with the number that tested the first draft token."""

    class OnePurpose(RoundNoise):
        def uniforms(self, purpose: Purpose, count: int) -> Tensor:
            return numbers.uniforms(Purpose.ACCEPT_TEST, count)

    def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
        nonlocal numbers
        numbers = noise
        return RULES[mode].judge(items, scores, OnePurpose(items))

    numbers: RoundNoise
    assert error_of(mode, AcceptanceRule(judge)) > CAUGHT


@pytest.mark.planted
@pytest.mark.parametrize(("mode", "rule"), wrong(trusts_the_first, shares_noise=True))
def test_catches_a_rule_choosing_the_drafts_token(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    with pytest.raises(AssertionError):
        check_own_choices(mode, rule)


@pytest.mark.planted
@pytest.mark.parametrize(("mode", "rule"), wrong(as_the_first))
def test_catches_a_rule_that_mixes_rounds(mode: AcceptanceMode, rule: AcceptanceRule) -> None:
    with pytest.raises(AssertionError):
        check_alone(mode, rule)


@pytest.mark.planted
@pytest.mark.parametrize("mode", RULES)
def test_catches_a_rule_that_reads_the_device_too_early(mode: AcceptanceMode) -> None:
    def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
        assert not scores.isnan().any()
        return RULES[mode].judge(items, scores, noise)

    with pytest.raises(RuntimeError, match="meta"):
        check_form(mode, AcceptanceRule(judge))


# ---- rounds to judge -------------------------------------------------------------------------------


def random_tables(vocab: int, levels: int) -> Tables:
    """float32 scores after each prefix."""
    generator = torch.Generator().manual_seed(vocab)
    return [torch.randn(vocab**i, vocab, generator=generator) * 1.5 for i in range(levels)]


def sixteenths(vocab: int, levels: int) -> Tables:
    """Weights of sums that are powers of two, some of them zero."""
    rows = torch.tensor([[10.0, 5.0, 1.0], [0.0, 4.0, 12.0], [7.0, 9.0, 0.0]], dtype=torch.float64)
    return [rows[torch.arange(vocab**i) % len(rows)] / 16 for i in range(levels)]


def row_after(tables: Tables, prefix: Sequence[int]) -> Tensor:
    index = 0
    for token in prefix:
        index = index * tables[0].shape[1] + token
    return tables[len(prefix)][index]


def batch(mode: AcceptanceMode, vocab: int = 6) -> tuple[list[VerifyItem], Tensor]:
    """Rounds of one mode with chains of all lengths, drawn and not drawn, and their logits."""
    rng = np.random.default_rng(3)
    made = []
    for i, k in enumerate((2, 0, 3, 1, 2, 3)):
        q = rng.dirichlet(np.ones(vocab), k) if mode.facts.needs_q and i % 3 else ()
        made.append(item(mode, rng.integers(0, vocab, k).tolist(), q, ledger=PROMPT * (1 + i), seed=i))
    logits = rng.standard_normal((sum(one.rows for one in made), vocab)) * 2
    return made, torch.from_numpy(logits).float()


def each_mode() -> list[tuple[VerifyItem, Tensor]]:
    """Rounds of every mode in turn, every other one greedy, with their logits."""
    batches = [batch(mode) for mode in RULES]
    rounds = []
    for i in range(len(batches[0][0])):
        for items, logits in batches:
            one, start = items[i], starts_of(items)[i]
            cold = replace(one.params, sampling=replace(one.params.sampling, temperature=float(i % 2)))
            rounds.append((replace(one, params=cold), logits[start : start + one.rows]))
    return rounds


@dataclass(frozen=True, slots=True)
class Scripted(RoundNoise):
    """Uniforms that are given; there are no others."""

    given: dict[Purpose, Tensor]

    def uniforms(self, purpose: Purpose, count: int) -> Tensor:
        return self.given[purpose][:, :count]


def judged_by(mode: AcceptanceMode, rule: AcceptanceRule, p: Tables, scores: Tables) -> Any:
    """The rule behind the arguments that an enumeration calls a test with."""
    assert [table.shape for table in p] == [table.shape for table in scores]

    def accept(
        draft: Tensor, num_draft: Tensor, rows: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
    ) -> Decision:
        chains = draft.tolist()
        items = [item(mode, chain, own) for chain, own in zip(chains, q.tolist(), strict=True)]
        own_scores = torch.stack([row_after(scores, c[:i]) for c in chains for i in range(len(c) + 1)])
        given = {Purpose.ACCEPT_TEST: accept_u, Purpose.NEXT_TOKEN: next_u[:, None]}
        pending = rule.judge(items, own_scores, Scripted(items, given))
        found = pending.read(pending.numbers.tolist())
        accepted = torch.tensor([o.num_accepted for o in found])
        return _decision(draft, num_draft, accepted, torch.tensor([o.next_token for o in found]))

    return accept
