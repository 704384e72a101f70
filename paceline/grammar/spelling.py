"""Prepares tokenizer.json for the library: renames special tokens to names that no text contains.

The library tokenises forced text with the tokenizer, which turns a special token's name into that token. A
choice of "<|endoftext|>" would thus lead to a token that is not text, and to a dead end. With other names,
such a text is tokenised like any other.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any


def plain(tokenizer: str) -> str:
    """Remove truncation and padding. Raises ValueError for an invalid tokenizer.json."""
    return json.dumps(json.loads(tokenizer) | {"truncation": None, "padding": None})


def added_ids(tokenizer: str) -> list[int]:
    """Ids of the added tokens."""
    return [token["id"] for token in json.loads(tokenizer).get("added_tokens", ())]


def without_names(tokenizer: str, special: Collection[int]) -> str:
    """Rename these added tokens; ids are unchanged."""
    content: dict[str, Any] = json.loads(tokenizer)
    names: dict[str, str] = {}
    for token in content.get("added_tokens", ()):
        if token["id"] in special:
            names[token["content"]] = token["content"] = f"<|\ufdd0{token['id']}\ufdd0|>"
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # pairs of text and score
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    unknown = model.get("unk_token")
    if unknown is not None:
        model["unk_token"] = names.get(unknown, unknown)
    return json.dumps(content)
