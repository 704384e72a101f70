"""No two modules of the product define a class of the same name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = ("coordinator", "draft_worker", "target_worker", "paceline")
CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)
"""Not by `ast`: a finalizer that raises while it parses makes it fail (CPython 3.11)."""
GENERATED = ROOT / "paceline" / "v1"
ALLOWED = {
    "SpeculativeDecoding": "clients see both: the SDK's part of a result, OpenAPI's part of a request",
}
"""Names that several modules define all the same, and why."""


def product_files() -> list[Path]:
    files = (file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py")))
    return [file for file in files if GENERATED not in file.parents]


def shared_names(files: Iterable[Path]) -> dict[str, list[str]]:
    """Public classes that several modules define, with these modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        for name in CLASS.findall(file.read_text()):
            found[name].append(file.name)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_modules_share_a_class_name() -> None:
    shared = shared_names(product_files())
    assert {name: modules for name, modules in shared.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() <= shared.keys(), "what is not shared any more needs no reason"


@pytest.mark.planted
def test_a_shared_class_name_is_noticed(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("class Twice: ...\nclass _Private: ...\n")
    (tmp_path / "three.py").write_text("class Once: ...\n")
    assert shared_names(sorted(tmp_path.iterdir())) == {"Twice": ["one.py", "two.py"]}
