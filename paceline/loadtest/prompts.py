"""Prompts of a load test: built-in ones, or a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import assets
from paceline.client.requests import token_ids_of
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.validation import integer, require
from paceline.rpc.codec import check_text

_FIELD: Final = "prompts"
_KEYS: Final = ("prompt", "max_tokens", "kind")
EMBEDDED_KINDS: Final = "embedded:kinds"
"""In place of a file: prompts of eight kinds of text."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt; `max_tokens` None takes the test's value."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    kind: str | None = None
    """Kind of text. `paceline measure` has figures for each kind."""


Prompts = Sequence[PromptLine]

PROMPTS: Prompts = (
    PromptLine("import os\n\n\ndef read_lines(path):\n    "),
    PromptLine("import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n"),
    PromptLine("Write a function that reads a file line by line and returns the longest of its lines."),
    PromptLine('class Queue:\n    """A bounded queue."""\n\n    def __init__(self, maxsize=0):\n        '),
    PromptLine("Explain to somebody who has never seen it how water comes into a house and leaves it again."),
    PromptLine("def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n        "),
    PromptLine("The three things that a traveller in the mountains must never leave at home are"),
    PromptLine('{"name": "Ada", "born": 1815, "languages": ["English"]}\n{"name": "Alan", "born": '),
)
"""Short built-in prompts, code and prose. Use `read_prompts` for real traffic."""


def read_prompts(file: Path) -> Prompts:
    """Read one JSON object per line: `prompt` is text or a list of token ids, `max_tokens` and `kind` are
    optional. The file `embedded:kinds` is part of Paceline.

    Empty lines and a byte order mark are skipped. Raises InvalidArgumentError naming the line.
    """
    if str(file) == EMBEDDED_KINDS:
        file = assets.prompts_of_all_kinds()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidArgumentError(_FIELD, f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(_FIELD, f"{file} cannot be read as text") from None
    # Not splitlines: JSON text may contain other line separators, such as U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    require(bool(lines), _FIELD, f"{file} has no prompt")
    return [_prompt(f"{_FIELD}: line {number}", line) for number, line in lines]


def _prompt(name: str, line: str) -> PromptLine:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidArgumentError(name, "is not JSON") from None
    require(isinstance(value, dict), name, "must be an object")
    for key in value:
        require(key in _KEYS, name, f"unknown field {key!r}; known are {', '.join(_KEYS)}")
    require("prompt" in value, name, "has no prompt")
    prompt, most, kind = (value.get(key) for key in _KEYS)
    require(kind is None or (isinstance(kind, str) and bool(kind)), f"{name}: kind", "must be text")
    if most is not None:
        integer(f"{name}: max_tokens", most)
        require(1 <= most <= limits.MAX_TOKENS, f"{name}: max_tokens", f"must be in [1, {limits.MAX_TOKENS}]")
    if isinstance(prompt, str):
        require(bool(prompt), f"{name}: prompt", "is empty")
        check_text(f"{name}: prompt", prompt)  # JSON can encode lone surrogates, which UTF-8 cannot
        return PromptLine(prompt, most, kind)
    require(isinstance(prompt, list), f"{name}: prompt", "must be text or a list of token ids")
    require(bool(prompt), f"{name}: prompt", "is empty")
    return PromptLine(token_ids_of(f"{name}: prompt", prompt), most, kind)
