"""A run as JSON, as tables and as pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest
from rich.console import Console

from paceline.bench import print_record, require_matplotlib, write_plots
from paceline.bench.cells import Cells
from paceline.bench.figures import RATIOS
from paceline.bench.machine import Model
from paceline.bench.plots import _caption
from paceline.bench.record import Record
from paceline.core.errors import FailedPreconditionError


def shown(record: Record) -> str:
    console = Console(file=io.StringIO(), width=160, markup=False)
    print_record(record, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, start: str) -> list[str]:
    """The first line that begins so, as words after it."""
    return next(line for line in text.splitlines() if line.startswith(start)).removeprefix(start).split()


def test_json_has_the_ratios_as_numbers_and_everything_else_beside_them(
    record: Record, tmp_path: Path
) -> None:
    record.write(tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    assert tuple(read["ratios"]) == RATIOS
    assert read["ratios"]["speculative_over_plain"] == pytest.approx(2.0)
    assert read["ratios_by_temperature"]["1"]["worst_over_plain"]["concurrency"] == 4
    assert set(read["figures_by_temperature"]) == {"0", "1"}
    assert read["figures_by_temperature"]["0"]["alpha"] == pytest.approx(0.75)
    second = read["by_k_by_temperature"]["0"][1]
    assert second["figures"]["k"] == 2
    assert second["ratios"]["speculative_over_plain"]["value"] == pytest.approx(1.6)
    assert read["settings"]["acceptance"] == ["coupled"]
    assert read["settings"]["draft_device"] is None
    assert read["models"]["target"]["weight_bytes"] == 20_000_000
    assert read["machine"]["read_bandwidth"] == 10e9


def test_json_has_every_run_of_every_cell(record: Record) -> None:
    cells = record.to_dict()["cells"]
    assert len(cells) == len(list(record.cells))
    (plain,) = (c for c in cells if (c["arm"], c["temperature"], c["concurrency"]) == ("plain", 0.0, 2))
    assert [run["tokens_per_second"] for run in plain["runs"]] == [200.0, 100.0]
    assert [run["processor_seconds"]["draft"] for run in plain["runs"]] == [0.02, 0.02]
    assert plain["processor_seconds_per_token"]["draft"] == pytest.approx(0.04 / 40)
    assert plain["tokens_per_second"]["median"] == 150.0
    (peer,) = (c for c in cells if c["arm"] == "transformers generate" and c["temperature"] == 1.0)
    assert peer["k"] is peer["lookahead"] is None
    assert "counts" not in peer


def test_tables_show_rates_ratios_and_what_is_absent(record: Record) -> None:
    text = shown(record)
    assert row(text, "lookahead, coupled, K=4")[:5] == ["150.0", "125-175", "2.00", "19%", "2.05"]
    assert row(text, "speculative_over_plain") == ["2.00", "[2.00-2.00]", "1.60", "[1.60-1.60]"]
    assert row(text, "served_over_plain") == ["2.40", "[2.40-2.40]"] * 2
    assert row(text, "worst_over_plain")[:4] == ["1.28", "[1.28-1.28]", "at", "4"]
    assert row(text, "without_lookahead_over_plain") == ["1.50", "[1.50-1.50]", "1.25", "[1.25-1.25]"]
    assert row(text, "α: accepted of the draft tokens judged") == ["0.75", "0.75"]
    assert row(text, "target time a round waits for, over a step") == ["1.50", "1.50"]
    assert row(text, "... with the target time a round waits for") == ["1.61", "1.61"]
    assert row(text, "step over floor") == ["5.00", "5.00"]
    assert row(text, "client's share of a core, at most") == ["90%"] * 3
    by_process = text.partition("Processor time of a token in ms, temperature 1")[2]
    assert row(by_process, "as served, coupled, K=auto") == ["5.00", "1.00", "1.50", "0.50"] * 3
    assert "CTranslate2: absent, pip install ctranslate2" in text


def at(record: Record, *concurrency: int) -> Record:
    """The same run, of these alone."""
    cells = Cells(cell for cell in record.cells if cell.concurrency in concurrency)
    return replace(record, config=replace(record.config, concurrency=concurrency), cells=cells)


def under_load(text: str) -> set[str]:
    """Names of the rows of the first table by concurrency."""
    table = text.partition("Requests at a time")[2].split("\n\n")[0]
    _, _, heads_and_rows = table.partition("\n ")
    return {line.partition("  ")[0] for line in heads_and_rows.splitlines()[1:]}


@pytest.mark.parametrize("concurrency", [(4,), (1, 4), (1, 2, 4)])
def test_what_was_measured_at_several_requests_is_shown(record: Record, concurrency: tuple[int, ...]) -> None:
    """Once: at a single concurrency nothing was, and at one beside 1 not how plain decoding repeats."""
    assert under_load(shown(at(record, *concurrency))) == {
        "plain, again",
        "plain",
        "speculative, coupled, K=4",
        "lookahead, coupled, K=4",
        "lookahead, coupled, K=2",
        "lookahead, coupled, K=auto",
        "as served, coupled, K=auto",
        "client's share of a core, at most",
    }


def test_nothing_explains_one_request_where_none_was_measured(record: Record) -> None:
    assert "What explains it" in shown(record)
    several = shown(at(record, 2, 4))
    assert "What explains it" not in several
    assert row(several, "worst_over_plain")


def test_one_k_needs_no_table_by_k(record: Record) -> None:
    assert "By K, one request, temperature 1" in shown(record)
    assert "By K" not in shown(replace(record, config=replace(record.config, k=(4,))))


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        ("cuda:0", "cuda:0", "draft and target share one device (A GPU) and its time"),
        ("cuda:0", "cuda:1", "target and draft have a device each (A GPU, A GPU); peers have the target's"),
        ("cpu", "cpu", "draft, target, coordinator and client share 2 cores; 1 thread(s) a model"),
        ("cpu", "cuda:0", "target, coordinator and client share 2 cores; 1 thread(s) a model"),
        ("cuda:0", "cpu", "draft, coordinator and client share 2 cores; 1 thread(s) a model"),
    ],
)
def test_who_shares_a_device_is_told(record: Record, target: str, draft: str, says: str) -> None:
    def on(model: Model, device: str) -> Model:
        return replace(model, device=device, device_name="A Processor" if device == "cpu" else "A GPU")

    placed = replace(record, target=on(record.target, target), draft=on(record.draft, draft))
    assert says in placed.notes
    assert sum("share" in note for note in placed.notes) == ("share" in says)
    assert any("a device each" in note for note in placed.notes) is (target != draft)


def test_pictures_name_both_devices(record: Record) -> None:
    assert _caption(record).startswith("A Processor, 2 cores; ")
    apart = replace(record, target=replace(record.target, device="cuda:0", device_name="A GPU"))
    assert _caption(apart).startswith("A GPU and A Processor, 2 cores; ")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_slowed_model_is_called_synthetic(record: Record, role: str) -> None:
    slowed = replace(record, config=replace(record.config, **{f"{role}_pass_seconds": 0.02}))
    assert any(f"synthetic: a pass of our {role} takes 20 ms" in note for note in slowed.notes)
    assert not any("synthetic" in note for note in record.notes)


def test_plots_are_pictures(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = write_plots(record, tmp_path / "plots")
    assert [file.name for file in files] == ["throughput.png", "ratios.png", "rounds.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_run_at_one_concurrency_has_its_plot(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert [file.name for file in write_plots(at(record, 4), tmp_path)] == ["throughput.png"]


def test_a_run_at_one_request_has_no_plot_over_concurrency(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    alone = replace(record, config=replace(record.config, concurrency=(1,)))
    assert {file.name for file in write_plots(alone, tmp_path)} == {"ratios.png", "rounds.png"}


def test_answers_that_end_with_their_opening_are_drawn_too(record: Record, tmp_path: Path) -> None:
    """As with `--max-tokens 4`: no round is left to be shown."""
    pytest.importorskip("matplotlib")
    for cell in record.cells:
        cell.opening = cell.counts
    assert "rounds.png" in {file.name for file in write_plots(record, tmp_path)}


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr("paceline.bench.plots.find_spec", util.find_spec)
    with pytest.raises(FailedPreconditionError, match="its extra `bench`"):
        require_matplotlib()
