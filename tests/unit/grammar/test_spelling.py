"""Names of special tokens in the texts of a structure: spelled like any other text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.refusals import refused
from tokenizers import Tokenizer

from paceline.assets.tokenizer import load_tokenizer
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars
from paceline.grammar.spelling import added_ids, without_names

END, CHAT, TOOL = "<|endoftext|>", "<|im_start|>", "<tool_call>"


def content() -> dict[str, Any]:
    """The embedded tokenizer, with one more special token, and one that is not called special."""
    loaded: dict[str, Any] = json.loads(load_tokenizer("embedded:target", "tokenizer").to_str())
    shape = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    loaded["added_tokens"] += [
        {"id": 2048, "content": CHAT, "special": True, **shape},
        {"id": 2049, "content": TOOL, "special": False, **shape},
    ]
    return loaded


TEXT = json.dumps(content())
TOKENIZER = Tokenizer.from_str(TEXT)
KNOWN = Grammars(TEXT, 2050, (0,))


def first_text(**wanted: Any) -> list[int]:
    """The tokens of the text with the lowest ids."""
    structure = StructuredOutputs(**wanted)
    KNOWN.check(structure)
    state, tokens = KNOWN.alone(structure), list[int]()
    while True:
        (row,) = state.masks(tokens)
        row[0] &= row.sum() == 1
        tokens.append(int(row.argmax()))
        if tokens[-1] == 0:
            return tokens[:-1]


@pytest.mark.parametrize("name", [END, CHAT, TOOL])
@pytest.mark.parametrize("text", ["{}", "a{}b", "{}{}"])
def test_a_choice_named_like_a_special_token_is_text(name: str, text: str) -> None:
    chosen = text.format(name, name)
    tokens = first_text(choice=[chosen])
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == chosen
    assert not {0, 2048, 2049} & set(tokens)


@pytest.mark.parametrize("name", [END, CHAT, TOOL])
def test_every_form_accepts_a_special_tokens_name_as_text(name: str) -> None:
    for wanted, text in (
        ({"regex": name.replace("|", r"\|") + "x"}, f"{name}x"),
        ({"json": {"const": name}}, f'"{name}"'),
        ({"grammar": f'start: "a" "{name}"'}, f"a{name}"),
    ):
        assert TOKENIZER.decode(first_text(**wanted), skip_special_tokens=True) == text


def test_a_grammar_may_name_special_tokens_except_the_end() -> None:
    assert first_text(grammar=f'start: "a" {CHAT} "b" {TOOL}')[1::2] == [2048, 2049]
    with pytest.raises(InvalidArgumentError, match="unknown special token"):
        KNOWN.check(StructuredOutputs(grammar=f'start: "a" {END} "b"'))


def test_a_grammar_with_name_and_text_is_refused() -> None:
    with refused("structured_outputs.grammar", "name of a special token"):
        KNOWN.check(StructuredOutputs(grammar=f'start: "{CHAT}" {CHAT}'))


def test_renaming_special_tokens_keeps_ids_and_texts() -> None:
    changed = Tokenizer.from_str(without_names(TEXT, [0, 2048]))
    assert changed.get_vocab_size() == TOKENIZER.get_vocab_size()
    assert changed.token_to_id(CHAT) is None
    assert changed.id_to_token(2049) == TOOL
    assert changed.encode("def f(x):\n").ids == TOKENIZER.encode("def f(x):\n").ids
    assert added_ids(TEXT) == [0, 2048, 2049]


def test_a_vocabulary_with_scores_keeps_its_unknown_token() -> None:
    text = json.dumps(
        {
            "added_tokens": [{"id": 0, "content": "<unk>"}],
            "model": {"vocab": [["<unk>", 0.0], ["a", -1.0]], "unk_token": "<unk>"},
        }
    )
    model = json.loads(without_names(text, [0]))["model"]
    assert model["vocab"][0][0] == model["unk_token"] != "<unk>"
    assert model["vocab"][1] == ["a", -1.0]
