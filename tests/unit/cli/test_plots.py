"""The paper's figures as files, and what is refused before they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import app as cli
from paceline.core.errors import InvalidArgumentError
from paceline.plots import Mark, check_plots, draw_plots


def test_three_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install '.[plots]'")
    files = draw_plots(
        [Mark("a draft", 0.8, 0.1), Mark("a table", 0.0, 0.0), Mark("perfect", 1.0, 0.5)], tmp_path
    )
    assert [file.name for file in files] == [
        "figure-2-tokens-per-round.png",
        "figure-3-best-k.png",
        "figure-4-speed-and-operations.png",
    ]
    (tmp_path / "plain").mkdir()
    unmarked = draw_plots([], tmp_path / "plain")
    for marked, plain in zip(files, unmarked, strict=True):
        content = marked.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert content != plain.read_bytes()


def test_without_matplotlib_plots_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidArgumentError, match=r"paceline\[plots\]") as refused:
        check_plots(tmp_path)
    assert refused.value.field == "plots"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="cannot be made"):
        check_plots(tmp_path / "file" / "folder")


def test_plan_draws_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install '.[plots]'")
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--alpha", "0.7", "--c", "0.1", "--plots", str(tmp_path / "new")])
    assert not end.value.code, capsys.readouterr().err
    assert len(list((tmp_path / "new").glob("*.png"))) == 3
