"""A run as JSON and as tables."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.bench import print_record
from paceline.bench.machine import MeasuredModel
from paceline.bench.record import BenchRecord


def shown(record: BenchRecord) -> str:
    console = Console(file=io.StringIO(), width=160, markup=False)
    print_record(record, console)
    return console.file.getvalue()


def row(text: str, start: str) -> list[str]:
    """The first line that begins so, as words after it."""
    return next(line for line in text.splitlines() if line.startswith(start)).removeprefix(start).split()


def test_json_has_ratios_figures_and_settings(record: BenchRecord, tmp_path: Path) -> None:
    record.write(tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    assert [(each["temperature"], each["k"]) for each in read["speculation"]] == [
        (0, 4),
        (0, 2),
        (1, 4),
        (1, 2),
    ]
    assert read["speculation"][0]["speculative_over_plain"] == {
        "value": pytest.approx(2.0),
        "q1": pytest.approx(2.0),
        "q3": pytest.approx(2.0),
        "of": "lookahead, K=4",
        "to": "plain",
    }
    assert read["speculation"][0]["alpha"] == pytest.approx(0.75)
    assert [each["concurrency"] for each in read["service"]] == [1, 2, 4] * 2
    assert read["service"][2]["plain_over_itself"]["value"] == pytest.approx(0.96)
    assert read["settings"]["acceptance"] == "coupled"
    assert read["settings"]["draft_device"] is None
    assert read["models"]["target"]["weight_bytes"] == 20_000_000
    assert read["machine"]["read_bandwidth"] == 10e9


def test_json_has_every_run_of_every_cell(record: BenchRecord) -> None:
    cells = record.to_dict()["cells"]
    assert len(cells) == len(record.cells)
    (plain,) = (c for c in cells if (c["arm"], c["temperature"], c["concurrency"]) == ("plain", 0.0, 2))
    assert [run["tokens_per_second"] for run in plain["runs"]] == [200.0, 100.0]
    assert plain["tokens_per_second"]["median"] == 150.0
    ahead = next(c for c in cells if c["arm"] == "lookahead, K=4")
    assert ahead["coordinator_and_wire_share"] == pytest.approx(0.2)
    tree = next(c for c in cells if c["arm"] == "tree of 16, K=4")
    assert (tree["k"], tree["tree_width"], tree["max_tree_nodes"]) == (4, 4, 16)
    assert tree["counts"]["num_draft_tokens"] == 16 * tree["counts"]["num_spec_steps"]
    assert ahead["tree_width"] is ahead["max_tree_nodes"] is None
    (peer,) = (c for c in cells if c["arm"] == "transformers generate" and c["temperature"] == 1.0)
    assert peer["k"] is None
    assert "counts" not in peer


def test_tables_show_rates_ratios_and_figures(record: BenchRecord) -> None:
    text = shown(record)
    assert row(text, "lookahead, K=4")[:5] == ["150.0", "125-175", "2.00", "2.00", "75%"]
    assert row(text, "tree of 16, K=4")[:5] == ["127.5", "106-149", "1.70", "2.00", "75%"]
    assert row(text, "speculative_over_plain") == ["2.00", "[2.00-2.00]", "1.60", "[1.60-1.60]"]
    assert row(text, "alpha") == ["0.750"] * 2
    assert row(text, "verification_over_step") == ["1.500"] * 2
    assert row(text, "coordinator_and_wire_share") == ["20%"] * 2
    assert row(text, "target_step_seconds") == ["10.00", "ms"] * 2
    assert row(text, "highest client CPU share") == ["90%"] * 3
    service = text.partition("The service with default settings")[2]
    assert row(service, "1") == ["2.40", "[2.40-2.40]", "0.95", "[0.95-0.95]"]
    assert row(service, "4")[:2] == ["1.28", "[1.28-1.28]"]


def at(record: BenchRecord, *concurrency: int) -> BenchRecord:
    """The same run, of these alone."""
    cells = {key: cell for key, cell in record.cells.items() if cell.concurrency in concurrency}
    return replace(record, config=replace(record.config, concurrency=concurrency), cells=cells)


def under_load(text: str) -> set[str]:
    """Names of the rows of the first table by concurrency."""
    table = text.partition("Tokens/s of all")[2].split("\n\n")[0]
    _, _, heads_and_rows = table.partition("\n ")
    return {line.partition("  ")[0] for line in heads_and_rows.splitlines()[1:]}


@pytest.mark.parametrize("concurrency", [(4,), (1, 4), (1, 2, 4)])
def test_results_of_concurrent_requests_are_shown(record: BenchRecord, concurrency: tuple[int, ...]) -> None:
    assert under_load(shown(at(record, *concurrency))) == {
        "plain, again",
        "plain",
        "lookahead, K=4",
        "lookahead, K=2",
        "tree of 16, K=4",
        "lookahead, K=auto",
        "as served",
        "highest client CPU share",
    }


@pytest.mark.parametrize("concurrency", [(1,), (2, 4)])
def test_only_measured_results_are_shown(record: BenchRecord, concurrency: tuple[int, ...]) -> None:
    text = shown(at(record, *concurrency))
    assert ("SpeculationFigures by K" in text) is (concurrency == (1,))
    assert ("Tokens/s of all" in text) is (concurrency != (1,))
    assert text.count("The service with default settings") == 2


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        ("cuda:0", "cuda:0", "draft and target share one device (A GPU)"),
        ("cuda:0", "cuda:1", "target and draft have separate devices (A GPU, A GPU); peers use the target's"),
        ("cpu", "cpu", "draft, target, coordinator and client share 2 cores; 1 thread(s) per model"),
        ("cpu", "cuda:0", "target, coordinator and client share 2 cores; 1 thread(s) per model"),
        ("cuda:0", "cpu", "draft, coordinator and client share 2 cores; 1 thread(s) per model"),
    ],
)
def test_a_shared_device_is_noted(record: BenchRecord, target: str, draft: str, says: str) -> None:
    def on(model: MeasuredModel, device: str) -> MeasuredModel:
        return replace(model, device=device, device_name="A Processor" if device == "cpu" else "A GPU")

    placed = replace(record, target=on(record.target, target), draft=on(record.draft, draft))
    assert says in placed.notes
    assert sum("share" in note for note in placed.notes) == ("share" in says)
    assert any("separate devices" in note for note in placed.notes) is (target != draft)
