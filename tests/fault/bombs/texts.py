"""Texts small to send but expensive to tokenise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TEXTS: Final[Mapping[str, str]] = {
    "zero-width joiners": "\u200d",
    "spaces": " ",
    "line ends": "\n",
    "one letter": "a",
    "letters with marks": "e\u0301",
    "ideographs": "漢",
    "beyond the plane": "\U0001f9ff",
    "byte order marks": "\ufeff",
    "words": "def main(): return 1\n",
}


def text_of(name: str, characters: int) -> str:
    """So many characters of it."""
    unit = TEXTS[name]
    return (unit * (characters // len(unit) + 1))[:characters]
