"""Slow and obvious versions of plain decoding, verdicts and proposals; every faulty run must equal them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.types import (
    AcceptanceMode,
    FinishReason,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    TreeShape,
)
from paceline.decoding.noise import Purpose, gumbel, uniforms
from tests.sim.toys import ToyModel, forbidden, own_choice, softmax


@dataclass(frozen=True)
class Expected:
    """What the client must have received when its request finished."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason


def letter(token_id: int) -> str:
    """The text of a toy token."""
    return chr(ord("a") + token_id)


class LetterDetokenizer:
    """One letter a token."""

    def push(self, token_id: int) -> str:
        return letter(token_id)

    def finish(self) -> str:
        return ""


def earliest_stop(text: str, stops: Sequence[str], border: int) -> tuple[int, str] | None:
    """(where it begins, the stop string) of which the last character is read first, behind the border."""
    for end in range(border + 1, len(text) + 1):
        for begin in range(end):
            if text[begin:end] in stops:
                return begin, text[begin:end]
    return None


def plain_decoding(
    model: ToyModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    eos: Sequence[int] = (),
    max_model_len: int = 10**6,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> Expected:
    """Token by token, without draft, cache, rounds or processes. Greedy and coupled modes."""
    tokens = list(prompt)
    text = ""
    free_of_stops = 0
    limit = max_model_len - len(prompt)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    while True:
        token = own_choice(model, tokens, sampling, len(prompt), eos, bad_words)
        tokens.append(token)
        generated = tuple(tokens[len(prompt) :])
        if token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos):
            if sampling.include_stop_str_in_output and token in sampling.stop_token_ids:
                text += letter(token)
            return Expected(generated, text, FinishReason.STOP)
        text += letter(token)
        if len(generated) <= sampling.min_tokens:
            free_of_stops = len(text)
        elif (found := earliest_stop(text, sampling.stop, free_of_stops)) is not None:
            begin, stop = found
            shown = begin + len(stop) if sampling.include_stop_str_in_output else begin
            return Expected(generated, text[:shown], FinishReason.STOP)
        if len(generated) >= limit:
            return Expected(generated, text, FinishReason.LENGTH)


def dense(sparse: SparseDistribution, vocab_size: int) -> np.ndarray:
    """float64 [V]: what a draft token was drawn from, normalised."""
    q = np.zeros(vocab_size)
    q[np.frombuffer(sparse.token_ids, "<u4")] = np.frombuffer(sparse.probabilities, "<f4")
    return q / q.sum()


def invert(weights: np.ndarray, u: float) -> int:
    """The first index at which the running sum passes u times the whole sum."""
    total, running = float(weights.sum()), 0.0
    for index, weight in enumerate(weights):
        running += float(weight)
        if running > u * total:
            return index
    return int(np.flatnonzero(weights)[-1])


def masked_probabilities(
    model: ToyModel, prefix: Sequence[int], params: SequenceParams, eos: Sequence[int]
) -> np.ndarray:
    """float64 [V] at the request's temperature, what may not come next masked."""
    sampling = params.sampling
    logits = model.logits(prefix).astype(np.float64) / sampling.temperature
    words = params.bad_words_token_ids
    logits[forbidden(model.vocab_size, prefix, sampling, params.prompt_length, eos, words)] = -np.inf
    return softmax(logits)


def slow_verdict(
    model: ToyModel,
    ledger: Sequence[int],
    params: SequenceParams,
    proposal: Proposal,
    eos: Sequence[int] = (),
) -> tuple[int, int]:
    """(accepted, next token), written from the formulas of docs/decoding.md, one number at a time."""
    draft, sampling = proposal.token_ids, params.sampling
    if sampling.greedy or params.mode is AcceptanceMode.COUPLED:
        for i in range(len(draft) + 1):
            prefix = [*ledger, *draft[:i]]
            own = own_choice(model, prefix, sampling, params.prompt_length, eos, params.bad_words_token_ids)
            if i == len(draft) or own != draft[i]:
                return i, own
    assert sampling.seed is not None
    p = [masked_probabilities(model, [*ledger, *draft[:i]], params, eos) for i in range(len(draft) + 1)]
    q = [dense(d, model.vocab_size) for d in proposal.distributions] or [
        np.eye(model.vocab_size)[token] for token in draft
    ]
    tests = uniforms([sampling.seed], [len(ledger)], Purpose.ACCEPT_TEST, max(len(draft), 1))[0].tolist()
    next_u = float(uniforms([sampling.seed], [len(ledger)], Purpose.NEXT_TOKEN, 1)[0, 0])
    accepted, scale = 0, 1.0
    if params.mode is AcceptanceMode.REJECTION:
        while accepted < len(draft):
            token = draft[accepted]
            if tests[accepted] >= p[accepted][token] / q[accepted][token]:
                break
            accepted += 1
    else:
        pi = [1.0]
        for i in range(1, len(draft) + 1):
            token = draft[i - 1]
            pi.append(min(1.0, pi[-1] * p[i - 1][token] / q[i - 1][token]))
            if i == len(draft):
                bound = pi[i]
            else:
                residual = np.maximum(pi[i] * p[i] - q[i], 0).sum()
                rest = residual + 1 - pi[i]
                bound = residual / rest if rest > 0 else 1.0
            if tests[i - 1] <= bound:
                accepted = i
        scale = pi[accepted]
    weights = p[accepted]
    if accepted < len(draft):
        residual = np.maximum(scale * weights - q[accepted], 0)
        weights = residual if residual.sum() > 1e-12 else weights
    return accepted, invert(weights, next_u)


def slow_tree_verdict(
    model: ToyModel,
    ledger: Sequence[int],
    params: SequenceParams,
    proposal: Proposal,
    eos: Sequence[int] = (),
) -> tuple[tuple[int, ...], int]:
    """(accepted nodes, next token) of a tree, likewise."""
    draft, sampling = proposal.token_ids, params.sampling
    path: list[int] = []
    if not params.target_decides:
        assert sampling.seed is not None
        of_try = proposal.tries or range(len(draft))
        tests = uniforms([sampling.seed], [len(ledger)], Purpose.ACCEPT_TEST, len(of_try))[0].tolist()
        next_u = float(uniforms([sampling.seed], [len(ledger)], Purpose.NEXT_TOKEN, 1)[0, 0])
    while True:
        at = path[-1] if path else -1
        prefix = [*ledger, *(draft[node] for node in path)]
        if params.target_decides:
            own = own_choice(model, prefix, sampling, params.prompt_length, eos, params.bad_words_token_ids)
            taken = [n for n, parent in enumerate(proposal.parents) if parent == at and draft[n] == own]
            if not taken:
                return tuple(path), own
        else:
            p, taken = masked_probabilities(model, prefix, params, eos), []
            for number, node in enumerate(of_try):
                if proposal.parents[node] != at:
                    continue
                q = np.eye(model.vocab_size)[draft[node]]
                if proposal.distributions:
                    q = dense(proposal.distributions[number], model.vocab_size)
                if tests[number] < p[draft[node]] / q[draft[node]]:
                    taken = [node]
                    break
                residual = np.maximum(p - q, 0)
                p = residual / residual.sum() if residual.sum() > 1e-12 else p
            if not taken:
                return tuple(path), invert(p, next_u)
        path += taken


def check_slow_proposal(
    model: ToyModel,
    ledger: Sequence[int],
    params: SequenceParams,
    proposal: Proposal,
    mass: float,
    eos: Sequence[int] = (),
) -> None:
    """Every draft token is the one the draft's own distribution and the round's noise give."""
    sampling = params.sampling
    choosing = sampling.greedy or params.mode is AcceptanceMode.COUPLED
    assert len(proposal.distributions) == (0 if choosing else len(proposal.token_ids))
    for i, token in enumerate(proposal.token_ids):
        prefix = [*ledger, *proposal.token_ids[:i]]
        if choosing:
            words = params.bad_words_token_ids
            assert token == own_choice(model, prefix, sampling, params.prompt_length, eos, words)
            continue
        assert sampling.seed is not None
        sent = proposal.distributions[i]
        ids = np.frombuffer(sent.token_ids, "<u4")
        values = np.frombuffer(sent.probabilities, "<f4").astype(np.float64)
        q = masked_probabilities(model, prefix, params, eos)
        order = np.argsort(-q)
        needed = int(np.searchsorted(np.cumsum(q[order]), mass - 1e-6)) + 1
        assert list(ids) == sorted(order[: len(ids)])
        assert needed <= len(ids) <= needed + 1
        np.testing.assert_allclose(values, q[ids] / q[ids].sum(), rtol=1e-4)
        u = float(uniforms([sampling.seed], [len(ledger)], Purpose.DRAFT_DRAW, i + 1)[0, i])
        assert token == ids[invert(values, u)]


def slow_tree(
    model: ToyModel,
    ledger: Sequence[int],
    params: SequenceParams,
    depth: int,
    shape: TreeShape,
    eos: Sequence[int] = (),
    beam: int = 0,
) -> Proposal:
    """The tree that a draft proposes in greedy or coupled mode, path by path; `beam`: if not the width."""
    sampling, words = params.sampling, params.bad_words_token_ids
    assert sampling.seed is not None
    values: dict[tuple[int, ...], float] = {}
    fed: list[tuple[int, ...]] = [()]
    for level in range(depth):
        for path in fed:
            prefix = [*ledger, *path]
            sums = model.logits(prefix).astype(np.float64)
            sums[forbidden(model.vocab_size, prefix, sampling, params.prompt_length, eos, words)] = -np.inf
            if not sampling.greedy:
                made = gumbel([sampling.seed], [len(prefix)], model.vocab_size)[0].numpy()
                sums = sums / sampling.temperature + made
            shares = softmax(sums)
            for token in np.argsort(-shares, kind="stable").tolist()[: shape.width]:
                if shares[token]:
                    values[*path, token] = values.get(path, 1.0) * shares[token]
        best = sorted(values, key=lambda path: -values[path])[: shape.nodes]
        fed = [path for path in best if len(path) == level + 1][: beam or shape.width]
    parents = tuple(best.index(path[:-1]) if path[:-1] else -1 for path in best)
    return Proposal(tuple(path[-1] for path in best), parents)


def check_slow_tries(
    model: ToyModel,
    ledger: Sequence[int],
    params: SequenceParams,
    tree: Proposal,
    mass: float,
    eos: Sequence[int] = (),
) -> None:
    """Try t is drawn by the round's number t, from q after its path without its earlier siblings."""
    count, seed = tree.num_draft_tokens, params.sampling.seed
    assert seed is not None
    assert len(tree.distributions) == count
    numbers = uniforms([seed], [len(ledger)], Purpose.DRAFT_DRAW, count, draft_index=params.draft_index)[0]
    for node, (token, sent) in enumerate(zip(tree.token_ids, tree.distributions, strict=True)):
        prefix = [*ledger, *(tree.token_ids[i] for i in tree.path_to(node)[:-1])]
        before = [tree.token_ids[i] for i in range(node) if tree.parents[i] == tree.parents[node]]
        q = masked_probabilities(model, prefix, params, eos)
        order = np.argsort(-q)
        needed = int(np.searchsorted(np.cumsum(q[order]), mass - 1e-6)) + 1
        ids = np.frombuffer(sent.token_ids, "<u4")
        values = np.frombuffer(sent.probabilities, "<f4").astype(np.float64)
        support = order[: len(ids) + len(before)]
        assert needed <= len(support) <= needed + 1
        assert list(ids) == sorted(set(support.tolist()) - set(before))
        np.testing.assert_allclose(values, q[ids] / q[support].sum(), rtol=1e-4)
        assert token == ids[invert(values, float(numbers[node]))]
