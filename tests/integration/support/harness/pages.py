"""Commands on the project's pages: fenced blocks, their statements, and code within sentences."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[4]
PAGES = tuple(
    str(page.relative_to(ROOT))
    for pattern in ("README.md", "docs/**/*.md", "deploy/**/*.md")
    for page in sorted(ROOT.glob(pattern))
)
_PARSER = MarkdownIt().enable("table")
_SHELL_PROMPT = re.compile(r"(?:[\w-]*\$) +")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the line of its fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """As an editor opens it."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Statement:
    """What a shell runs at once: assignments before the command, and the command's words."""

    text: str
    assignments: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def elided(self) -> bool:
        """Parts are left out, so that it cannot run as it stands."""
        return "…" in self.text


def blocks(page: str, text: str) -> list[Block]:
    """All blocks of a page, indented code too."""
    return [
        Block(page, token.map[0] + 1, token.info.strip(), token.content)
        for token in _PARSER.parse(text)
        if token.type in ("fence", "code_block") and token.map is not None
    ]


def inline_codes(text: str) -> list[str]:
    """Code within sentences, headings and tables."""
    return [
        token.content
        for block in _PARSER.parse(text)
        for token in block.children or ()
        if token.type == "code_inline"
    ]


def statements(text: str) -> list[Statement]:
    """Of a shell block. Where some lines have a prompt, `$` or `name$`, the others are output."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    typed = [line for line in lines if _SHELL_PROMPT.match(line)]
    found, pending = [], ""
    for line in [_SHELL_PROMPT.sub("", line, count=1) for line in typed] if typed else lines:
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            pending += "\n"
            continue
        if words:
            found.append(_statement(pending, words))
        pending = ""
    assert not pending, f"a quotation does not end: {pending}"
    return found


def _statement(text: str, words: list[str]) -> Statement:
    count = next((i for i, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    return Statement(text, tuple(words[:count]), tuple(words[count:]))
