"""Draft and target must share a vocabulary; the error says where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from paceline.core.errors import TokenizerMismatchError
from paceline.supervisor.stack import check_tokenizers


def model(folder: Path, *tokens: str) -> str:
    """A folder with a tokenizer of these tokens alone."""
    folder.mkdir()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
    return str(folder)


def test_equal_vocabularies_are_accepted(tmp_path: Path) -> None:
    check_tokenizers(model(tmp_path / "t", "a", "b"), model(tmp_path / "d", "a", "b"))


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        (("a", "c"), r"token 1 is 'c' in the draft \(2 tokens\) and 'b' in the target \(2 tokens\)"),
        (("a", "b", "c"), r"token 2 is 'c' in the draft \(3 tokens\) and missing in the target \(2 tokens\)"),
        (("b", "a"), r"token 0 is 'b' in the draft \(2 tokens\) and 'a' in the target"),
    ],
    ids=["another token", "one more", "another order"],
)
def test_the_first_difference_is_named(draft: tuple[str, ...], difference: str, tmp_path: Path) -> None:
    target = model(tmp_path / "t", "a", "b")
    with pytest.raises(TokenizerMismatchError, match=f"do not share a vocabulary: {difference}"):
        check_tokenizers(target, model(tmp_path / "d", *draft))
