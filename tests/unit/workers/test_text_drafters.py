"""Drafters without a model: q against independent counts, and the tokens that it leads to against p."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness.prompts import SOURCE

from draft_worker.drafters import corpus
from draft_worker.drafters.bigram import BigramScorer
from draft_worker.drafters.corpus import CorpusCounts, count_corpus
from draft_worker.drafters.ngram import NgramScorer
from draft_worker.drafters.random_tokens import UniformScorer
from draft_worker.drafters.stacked import StackedScorer
from draft_worker.drafters.tokens import Row, TextScorer
from draft_worker.drafters.unigram import UnigramScorer
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, Proposal, SparseDistribution
from paceline.decoding.acceptance import Decision, _decision
from paceline.decoding.noise import Purpose
from paceline.decoding.sampling import dense_from_sparse
from paceline.decoding.support import draw_sparse
from target_worker.acceptance.items import VerifyItem
from target_worker.acceptance.registry import RULES
from tests.unit.decoding.test_lossless_chains import Enumeration
from tests.unit.workers.test_rule_contract import DRAWN, EXACT, Scripted, item, random_tables, row_after

VOCAB = 3
TEXTS = [text for n in range(1, 7) for text in itertools.product(range(VOCAB), repeat=n)]
CORPUS = [(0, 1, 0, 1, 1), (2,), (), (1, 0, 0)]


def row_of(scorer: TextScorer, text: Sequence[int], vocab: int = VOCAB) -> Row:
    """The scores after a text that is taken in at once."""
    row = np.full(vocab, np.nan, dtype=np.float32)
    scorer.count(text, len(text))
    scorer.score(text, row)
    return row


def mixed(followers: Sequence[int], lower: Sequence[Fraction]) -> list[Fraction]:
    """One level of the interpolation, from the tokens that followed a context."""
    count, different = len(followers), len(set(followers))
    if not count:
        return list(lower)
    weight = Fraction(count, count + different)
    return [weight * Fraction(followers.count(v), count) + (1 - weight) * q for v, q in enumerate(lower)]


UNIFORM = [Fraction(1, VOCAB)] * VOCAB


def slow_ngram(text: Sequence[int], window: int = 1000) -> list[Fraction]:
    """q by the definition, from the text itself."""
    q = UNIFORM
    for n in range(1, min(3, len(text)) + 1):
        context = text[len(text) - n :]
        first = max(n, len(text) - window)
        q = mixed([text[i] for i in range(first, len(text)) if text[i - n : i] == context], q)
    return q


def slow_unigram(texts: Sequence[Sequence[int]]) -> list[Fraction]:
    return mixed([token for text in texts for token in text], UNIFORM)


def slow_bigram(texts: Sequence[Sequence[int]], last: int) -> list[Fraction]:
    followers = [after for text in texts for before, after in itertools.pairwise(text) if before == last]
    return mixed(followers, slow_unigram(texts))


def check_is(row: Row, q: Sequence[Fraction]) -> None:
    assert sum(q) == 1
    np.testing.assert_allclose(np.exp(row.astype(np.float64)), [float(x) for x in q], rtol=1e-6)


# ---- q ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1000, 3])
def test_ngram_interpolates_the_counts_of_the_text(window: int) -> None:
    for text in TEXTS:
        check_is(row_of(NgramScorer(VOCAB, window), text), slow_ngram(text, window))


def test_ngram_is_the_same_however_a_text_came_to_be() -> None:
    """Token by token, in one piece, and over longer texts that were cut back."""
    rng = random.Random(5)
    scorer, text = NgramScorer(VOCAB, window=9), [0]
    scorer.count(text, 1)
    for _ in range(400):
        if rng.random() < 0.3:
            kept = rng.randrange(1, len(text) + 1)
            scorer.count(text, kept)
            del text[kept:]
        else:
            text += rng.choices(range(VOCAB), k=rng.randrange(1, 15))
            scorer.count(text, len(text))
        row = np.empty(VOCAB, dtype=np.float32)
        scorer.score(text, row)
        assert row.tobytes() == row_of(NgramScorer(VOCAB, window=9), text).tobytes()


def test_ngram_takes_in_a_token_in_constant_time() -> None:
    """It looks at the positions that come and go, and at the three tokens before each."""

    class Text(list[int]):
        looked = 0

        def __getitem__(self, index: Any) -> Any:
            Text.looked += 1
            return super().__getitem__(index)

    def looked_at(length: int) -> int:
        text, scorer = Text(random.Random(2).choices(range(9), k=length)), NgramScorer(9, window=50)
        scorer.count(text, length)
        Text.looked = 0
        text.append(3)
        scorer.count(text, length + 1)
        scorer.count(text, length)
        return Text.looked

    assert looked_at(100) < 60
    assert looked_at(3000) < 60


def test_unigram_and_bigram_are_smoothed_frequencies() -> None:
    """Of texts that are apart; token 2 is followed by nothing."""
    counts = CorpusCounts.of(CORPUS, VOCAB)
    for text in TEXTS:
        check_is(row_of(UnigramScorer(counts), text), slow_unigram(CORPUS))
        check_is(row_of(BigramScorer(counts), text), slow_bigram(CORPUS, text[-1]))


def test_random_counts_nothing() -> None:
    assert len({float(score) for text in TEXTS for score in row_of(UniformScorer(), text)}) == 1


def test_a_context_is_a_token_that_was_followed_before() -> None:
    bigram = BigramScorer(CorpusCounts.of(CORPUS, VOCAB))
    for text in TEXTS:
        ngram = NgramScorer(VOCAB)
        ngram.count(text, len(text))
        assert ngram.has_context(text) == (text[-1] in text[:-1])
        assert bigram.has_context(text) == (text[-1] != 2)
        assert UniformScorer().has_context(text)


def test_stacked_takes_the_first_that_has_a_context() -> None:
    counts = CorpusCounts.of(CORPUS, VOCAB)
    for text in TEXTS:
        scorers = [NgramScorer(VOCAB), BigramScorer(counts), UniformScorer()]
        known = text[-1] in text[:-1], text[-1] != 2, True
        spoken = scorers[known.index(True)]
        assert row_of(StackedScorer(scorers), text).tobytes() == row_of(spoken, text).tobytes()
        assert StackedScorer(scorers[:2]).has_context(text) == any(known[:2])


# ---- what it leads to ---------------------------------------------------------------------------------

SCORERS: dict[str, Callable[[], TextScorer]] = {
    "unigram": lambda: UnigramScorer(CorpusCounts.of(CORPUS, VOCAB)),
    "bigram": lambda: BigramScorer(CorpusCounts.of(CORPUS, VOCAB)),
    "ngram": lambda: NgramScorer(VOCAB),
    "random": UniformScorer,
    "stacked": lambda: StackedScorer([NgramScorer(VOCAB), UniformScorer()]),
}
PROMPT = (0, 1, 0, 0, 1, 0)
"""Token 2 has no context after it."""
K = 2


def sent_after(name: str, drafted: Sequence[int], bound: int) -> SparseDistribution:
    row = torch.from_numpy(row_of(SCORERS[name](), (*PROMPT, *drafted)))
    half = torch.full((1,), 0.5, dtype=torch.float64)
    return draw_sparse(row[None], half, 1.0, bound)[1][0]


@pytest.mark.parametrize("bound", [1024, 2])
@pytest.mark.parametrize("mode", [mode for mode in DRAWN if mode.facts.lossless])
@pytest.mark.parametrize("name", SCORERS)
def test_tokens_have_the_targets_distribution(name: str, mode: AcceptanceMode, bound: int) -> None:
    """By integrating over all draws and tests of a round, with q as it is sent: whole, cut or uniform."""
    scores = random_tables(VOCAB, K + 1)
    p = [table.softmax(-1, dtype=torch.float64) for table in scores]
    prefixes = [list(itertools.product(range(VOCAB), repeat=i)) for i in range(K)]
    sent = {prefix: sent_after(name, prefix, bound) for level in prefixes for prefix in level}
    q = [dense_from_sparse([sent[prefix] for prefix in level], VOCAB) for level in prefixes]
    assert any(d.uniform_over for d in sent.values()) == (
        bound == 2 and name in ("random", "stacked", "ngram")
    )

    def accept(
        draft: torch.Tensor,
        num_draft: torch.Tensor,
        rows: torch.Tensor,
        judged: torch.Tensor,
        accept_u: torch.Tensor,
        next_u: torch.Tensor,
    ) -> Decision:
        chains = [tuple(chain) for chain in draft.tolist()]
        plain = item(mode, ())
        items = [
            VerifyItem(plain.params, plain.ledger, Proposal(c, (), tuple(sent[c[:i]] for i in range(K))))
            for c in chains
        ]
        own = torch.stack([row_after(scores, c[:i]) for c in chains for i in range(K + 1)])
        given = {Purpose.ACCEPT_TEST: accept_u, Purpose.NEXT_TOKEN: next_u[:, None]}
        pending = RULES[mode].judge(items, own, Scripted(items, given))
        found = pending.read(pending.numbers.tolist())
        accepted = torch.tensor([o.num_accepted for o in found])
        return _decision(draft, num_draft, accepted, torch.tensor([o.next_token for o in found]))

    assert Enumeration(accept, p, q).error < EXACT


# ---- texts --------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer: a token for each byte."""

    def __call__(self, texts: Sequence[str], **how: Any) -> dict[str, list[list[int]]]:
        assert how == {"add_special_tokens": False, "verbose": False}
        return {"input_ids": [list(text.encode()) for text in texts]}


BUILT: Any = SimpleNamespace(loaded=SimpleNamespace(tokenizer=Bytes(), vocab_size=256))


def counted(file: Path | str = "") -> CorpusCounts:
    return count_corpus(BUILT, DraftConfig(model="m", drafter="bigram", corpus=str(file)))


def pairs_of(counts: CorpusCounts) -> dict[tuple[int, int], int]:
    return {
        (first, int(second)): int(count)
        for first in range(256)
        for second, count in zip(*counts.after(first), strict=True)
    }


def test_a_file_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text(SOURCE, "utf-8")
    counts, text = counted(file), SOURCE.encode()
    assert counts.singles.tolist() == [Counter(text)[token] for token in range(256)]
    assert pairs_of(counts) == Counter(itertools.pairwise(text))


def test_a_long_file_is_counted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with a line, unless a line is longer than a piece."""
    monkeypatch.setattr(corpus, "_PIECE", 5)
    (tmp_path / "corpus.txt").write_text("ab\ncd\nefghijkl\n\nm")
    assert list(corpus._pieces("ab\ncd\nefghijkl\n\nm")) == ["ab\n", "cd\n", "efghi", "jkl\n\n", "m"]
    counts = counted(tmp_path / "corpus.txt")
    assert int(counts.singles.sum()) == 17
    assert (ord("i"), ord("j")) not in pairs_of(counts)


def test_the_embedded_text_is_source_code() -> None:
    counts = counted()
    assert counts.singles.sum() > 1_000_000
    followers = pairs_of(counts)
    assert max((n, b) for (a, b), n in followers.items() if a == ord("q"))[1] == ord("u")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe", "is not UTF-8")]
)
def test_an_unusable_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "corpus.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        counted(file)
    assert refused.value.field == "corpus"
