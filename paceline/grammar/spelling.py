"""The tokenizer as the library is given it: special tokens have names that no text has.

The library spells a text that is forced as the tokenizer would, and a tokenizer takes a special token's name
for the token itself. A choice of "<|endoftext|>" would so lead to a token that is no text, and to a dead end.
With other names for these tokens such a text is spelled like any other.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any


def plain(tokenizer: str) -> str:
    """Texts are read whole: no truncation, no padding. Raises ValueError for what is no tokenizer.json."""
    return json.dumps(json.loads(tokenizer) | {"truncation": None, "padding": None})


def added_ids(tokenizer: str) -> list[int]:
    """The tokens that were added to the model's own."""
    return [token["id"] for token in json.loads(tokenizer).get("added_tokens", ())]


def without_names(tokenizer: str, special: Collection[int]) -> str:
    """The same with other names for these added tokens; ids stay."""
    content: dict[str, Any] = json.loads(tokenizer)
    names: dict[str, str] = {}
    for token in content.get("added_tokens", ()):
        if token["id"] in special:
            names[token["content"]] = token["content"] = f"<|\ufdd0{token['id']}\ufdd0|>"
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # with a score each
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    unknown = model.get("unk_token")
    if unknown is not None:
        model["unk_token"] = names.get(unknown, unknown)
    return json.dumps(content)
