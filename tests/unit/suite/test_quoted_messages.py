"""Messages quoted in docs/troubleshooting.md are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
PRODUCT = ("paceline", "coordinator", "draft_worker", "target_worker")
SETTING = re.compile(r"^-*[\w.]+…?: ")
"""An error begins with the setting that it is about; its text follows."""


def quoted(page: str) -> list[str]:
    """Code of several words in the first column of the tables."""
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if " " in code]


def literals(source: str) -> Iterator[str]:
    """Every text in a module, with `…` for each value put into it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{[^}]*\}|%[sdr]", "…", node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))


def is_said(message: str, texts: list[str]) -> bool:
    """Whether one text holds all that the message has between its values."""
    parts = [part.strip(" ;,:") for part in SETTING.sub("", message).split("…")]
    return any(all(part in text for part in parts) for text in texts)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    sources = (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))
    return [text for file in sources for text in literals(file.read_text())]


def test_quoted_messages_are_in_the_code(texts: list[str]) -> None:
    messages = quoted(PAGE.read_text())
    assert len(messages) > 50
    assert [message for message in messages if not is_said(message, texts)] == []


@pytest.mark.planted
def test_a_message_missing_from_the_code_is_noticed(texts: list[str]) -> None:
    row = "| `… is in use; choose another port`, `… is in no use` | `some other code` |"
    assert [is_said(message, texts) for message in quoted(row)] == [True, False]
