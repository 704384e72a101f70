"""Links between the documents lead to existing files and headings."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "paceline/**/*.md")
    for page in ROOT.glob(pattern)
)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""What begins like this has a scheme, and is not ours."""
PARSER = MarkdownIt().enable("table")


def links(text: str) -> list[str]:
    """Targets of all links that lead to files of the project, or to places on the same page."""
    inline = (token for block in PARSER.parse(text) for token in block.children or ())
    targets = (str(token.attrGet("href")) for token in inline if token.type == "link_open")
    return [target for target in targets if not ELSEWHERE.match(target)]


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Names that GitHub gives the headings of a page; what comes again has a number behind it."""
    seen: Counter[str] = Counter()
    found = set()
    for block, content in itertools.pairwise(PARSER.parse(page.read_text())):
        if block.type == "heading_open":
            words = "".join(token.content for token in content.children or ())
            name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return frozenset(found)


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or bool(anchor and file.suffix == ".md" and anchor not in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page.read_text()) if leads_nowhere(page, link)] == []


@pytest.mark.planted
def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What *is* here, `now`\n\n# Twice\n\n# Twice\n\n"
        "[a](page.md#what-is-here-now) [b](#twice-1) [c](https://x.org/none.md) `[d](none.md)`\n\n"
        "| table |\n|---|\n| [e](none.md) [f](#none) [g](page.md#twice-2) |\n"
    )
    assert [link for link in links(page.read_text()) if leads_nowhere(page, link)] == [
        "none.md",
        "#none",
        "page.md#twice-2",
    ]
