"""Files besides Python in the packages are in the wheel."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("paceline", "draft_worker", "target_worker", "coordinator")


def left_out(root: Path, patterns: Mapping[str, Sequence[str]]) -> list[str]:
    """Files of the packages in `root` that are neither Python nor covered by the package-data `patterns`."""
    covered = {
        file
        for package, globs in patterns.items()
        for glob in globs
        for file in (root / package.replace(".", "/")).glob(glob)
    }
    there = (file for package in PACKAGES for file in (root / package).rglob("*") if file.is_file())
    return sorted(
        str(file.relative_to(root))
        for file in there
        if file.suffix != ".py" and "__pycache__" not in file.parts and file not in covered
    )


def test_every_file_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert left_out(ROOT, settings["tool"]["setuptools"]["package-data"]) == []


@pytest.mark.planted
def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    for name in ("paceline/a/CARD.md", "paceline/a/b/c.json", "paceline/x.py", "coordinator/form.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert left_out(tmp_path, {"paceline": ["a/*/*"]}) == ["coordinator/form.html", "paceline/a/CARD.md"]
