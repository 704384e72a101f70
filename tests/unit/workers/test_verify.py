"""Ratio tests with sparse numbers on a CPU and with tensors agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.types import AcceptanceMode, Outcome, Proposal, SamplingParams, SequenceParams
from paceline.decoding import acceptance, sparse_acceptance
from paceline.decoding.noise import gumbel
from paceline.decoding.support import draw_sparse
from target_worker import verify
from target_worker.acceptance import ratios
from target_worker.acceptance.items import VerifyItem
from target_worker.acceptance.ratios import judge_densely, judge_sparsely
from target_worker.acceptance.registry import RULES
from target_worker.verify import judge_all, verify_items

VOCAB = 50
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "logit_bias": {1: 2.0},
    "min_tokens": 3,
    "allowed_token_ids": range(40),
    "min_p": 0.1,
    "top_k": 5,
    "top_p": 0.9,
}
"""Of each kind of a transform one."""


def case(rng: np.random.Generator, k: int, mode: AcceptanceMode, points: bool) -> VerifyItem:
    params = SequenceParams(SamplingParams(seed=1), mode, 1)
    scores = torch.from_numpy(rng.standard_normal((k, VOCAB)).astype(np.float32))
    tokens, sent = draw_sparse(scores, torch.from_numpy(rng.random(k)), 0.95, 20)
    return VerifyItem(params, [0], Proposal(tuple(tokens), distributions=() if points else tuple(sent)))


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
@pytest.mark.parametrize("seed", range(20))
def test_sparse_and_dense_judging_agree(mode: AcceptanceMode, seed: int) -> None:
    """Chains of all lengths, none included, some of them without distributions."""
    rng = np.random.default_rng(seed)
    group = [case(rng, k, mode, points=rng.random() < 0.2) for k in rng.integers(0, 6, 1 + seed)]
    rows = sum(c.rows for c in group)
    p = torch.from_numpy(rng.standard_normal((rows, VOCAB)) * 1.5).softmax(-1)
    longest = max(1, *(c.num_draft for c in group), 0)
    noise = (
        torch.from_numpy(rng.random((len(group), longest))),
        torch.from_numpy(rng.random(len(group))),
    )
    name = f"accept_{mode.value}"
    by_sparse = judge_sparsely(group, p, *noise, getattr(sparse_acceptance, name))
    by_dense = judge_densely(group, p, *noise, getattr(acceptance, name))
    for sparse, dense in zip(by_sparse, by_dense, strict=True):
        assert torch.equal(sparse, dense)


def judge_on(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    """Take the way of a CPU, or that of a device, on the CPU."""
    for module in (verify, ratios):
        monkeypatch.setattr(module, "on_host", lambda tensor: host)


def rounds(rng: np.random.Generator) -> list[VerifyItem]:
    """Of all modes, greedy ones among them, some without a proposal."""
    cases = []
    for i, k in enumerate(rng.integers(0, 6, 12)):
        made = case(rng, int(k), list(AcceptanceMode)[i % 3], points=i % 4 == 0)
        if i % 3 == 0 or i % 5 == 0:
            made = dataclasses.replace(made, proposal=Proposal(made.proposal.token_ids))
        if i % 5 == 0:
            greedy = dataclasses.replace(made.params, sampling=SamplingParams(seed=1, temperature=0.0))
            made = dataclasses.replace(made, params=greedy)
        cases.append(made)
    return cases


@pytest.mark.parametrize("seed", range(6))
def test_one_device_read_gives_the_cpus_verdicts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's way, on the CPU, also for invalid rows."""
    rng = np.random.default_rng(seed)
    cases = rounds(rng)
    logits = torch.from_numpy(rng.standard_normal((sum(c.rows for c in cases), VOCAB)) * 2).float()
    if seed > 1:
        logits[rng.integers(0, len(logits), 3), rng.integers(0, VOCAB, 3)] = [torch.nan, torch.inf][seed % 2]
    allowed = logits.clone()
    allowed[:, ::7] = -torch.inf
    expected = verify_items(cases, logits, allowed)
    copies = 0
    read = verify.to_host

    def counted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal copies
        copies += 1
        return read(tensors)

    judge_on(monkeypatch, host=False)
    monkeypatch.setattr(verify, "to_host", counted)
    assert verify_items(cases, logits, allowed) == expected
    assert (None in expected) == (seed > 1)
    assert copies == 1


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", AcceptanceMode)
def test_without_a_possible_permitted_token_there_is_no_verdict(
    mode: AcceptanceMode, temperature: float, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No next token may be -1 or forbidden."""
    rng = np.random.default_rng(0)
    judge_on(monkeypatch, host=on_host)
    logits = torch.from_numpy(rng.standard_normal((2, VOCAB))).float()
    logits[:, 3] = -torch.inf

    def judged(allowed: int) -> tuple[int, int] | None:
        sampling = SamplingParams(seed=1, temperature=temperature, allowed_token_ids=(allowed,))
        one = dataclasses.replace(case(rng, 1, mode, points=False), params=SequenceParams(sampling, mode, 1))
        (verdict,) = verify_items([one], logits, logits)
        return verdict

    assert judged(3) is None
    verdict = judged(4)
    assert verdict is not None
    assert verdict[1] == 4


def choosing(rng: np.random.Generator, **sampling: object) -> VerifyItem:
    """A round of a request that asks for a temperature at most, unless told otherwise."""
    seed, ledger = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(1, 2000))
    asked = {"seed": seed, "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.7]), **sampling}
    draft = tuple(rng.integers(0, VOCAB, rng.integers(0, 6)).tolist())
    mode = AcceptanceMode.REJECTION if asked["temperature"] == 0 and seed % 2 else AcceptanceMode.COUPLED
    params = SequenceParams(SamplingParams(**asked), mode, 1)
    return VerifyItem(params, [0] * ledger, Proposal(draft))


@pytest.mark.parametrize("seed", range(12))
def test_the_short_way_gives_the_tensors_verdicts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all shares of accepted tokens, padded logits, ties and invalid rows; a request that asks for
    more sends its whole pass the general way."""
    rng = np.random.default_rng(seed)
    cases = [choosing(rng) for _ in range(1 + seed % 5)]
    total = sum(c.rows for c in cases)
    wide = torch.from_numpy(rng.standard_normal((total, VOCAB + 14))).float() * 3
    logits = wide[:, :VOCAB] if seed % 2 else wide[:, :VOCAB].contiguous()
    logits[:, 3], logits[0] = -torch.inf, logits[0].round()
    rule, taken = RULES[AcceptanceMode.COUPLED], []
    few = rule.judge_few
    seen = dataclasses.replace(rule, judge_few=lambda *of: taken.append(of) or few(*of))
    monkeypatch.setitem(RULES, AcceptanceMode.COUPLED, seen)
    # The target's own choices, some of them, are drafted too.
    for _ in range(3):
        verdicts = verify_items(cases, logits, logits)
        assert verdicts == verify_items(cases, logits, logits.clone())
        cases = [
            dataclasses.replace(
                c, proposal=Proposal((*c.proposal.token_ids[:a], t, *c.proposal.token_ids[a + 1 :]))
            )
            if a < c.num_draft
            else c
            for c, (a, t, _) in zip(cases, verdicts, strict=True)
        ]
    assert len(taken) == 3
    more = [*cases, choosing(rng, temperature=0.9, top_k=5)]
    also = torch.cat([logits, torch.randn(more[-1].rows, VOCAB)])
    assert verify_items(more, also, also)[:-1] == verify_items(cases, logits, logits)
    assert len(taken) == 4
    for spoil in (torch.nan, torch.inf, -torch.inf):
        spoiled = logits.clone()
        spoiled[int(rng.integers(total))] = spoil
        verdicts = verify_items(cases, spoiled, spoiled)
        assert verdicts == verify_items(cases, spoiled, spoiled.clone())
        assert verdicts.count(None) == 1


def test_the_short_way_rounds_like_the_tensors() -> None:
    """Two scores so close that multiplying by 1 / temperature would choose the other token."""
    rng, temperature = np.random.default_rng(5), np.float32(0.3)
    noise = gumbel([7], [1], 2)[0].numpy()

    def best(scores: np.ndarray) -> int:
        return int((scores.astype(np.float64) + noise).argmax())

    found = 0
    while found < 20:
        first = np.float32(rng.uniform(1, 9))
        exact, other = first / temperature, first * (np.float32(1) / temperature)
        if exact == other:
            continue
        between = (np.float64(exact) + other) / 2 + noise[0] - noise[1]
        pair = np.array([first, np.float32(between) * temperature], dtype=np.float32)
        chosen = best(pair / temperature)
        if chosen == best(pair * (np.float32(1) / temperature)):
            continue
        found += 1
        params = SequenceParams(SamplingParams(seed=7, temperature=0.3), AcceptanceMode.COUPLED, 1)
        logits = torch.from_numpy(pair)[None]
        for allowed in (logits, logits.clone()):
            assert verify_items([VerifyItem(params, [0], Proposal())], logits, allowed) == [
                Outcome(0, chosen)
            ]


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["nothing", "everything"])
def test_the_device_is_read_only_at_the_end(asked: dict[str, Any]) -> None:
    """Reading a tensor of the meta device is an error."""
    bad_words = ((1, 2), (3,)) if asked else ()
    cases = []
    for made in rounds(np.random.default_rng(3)):
        sampling = dataclasses.replace(made.params.sampling, **asked)
        params = dataclasses.replace(made.params, sampling=sampling, bad_words_token_ids=bad_words)
        cases.append(dataclasses.replace(made, params=params))
    logits = torch.empty(sum(c.rows for c in cases), VOCAB, device="meta")
    pending = judge_all(cases, logits, (0,))
    assert pending.numbers.device.type == "meta"
    with pytest.raises(NotImplementedError, match="no data"):
        verify_items(cases, logits, logits)
