"""`paceline bench` through real processes, on a tiny random pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.bench.arms import automatic, served
from paceline.bench.config import BenchConfig

HANG = 280.0  # seconds after which a test has failed


def test_a_short_run_reports_every_ratio(tiny_pair: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "paceline", "bench", "--quick"),
            *("--target-model", str(tiny_pair.target), "--draft-model", str(tiny_pair.draft)),
            *("--device", "cpu", "--concurrency", "1", "--concurrency", "2", "--k", "2"),
            *("--max-tree-nodes", "6"),
            *("--temperature", "0", "--temperature", "1", "--num-prompts", "2", "--max-tokens", "8"),
            *("--repeats", "2", "--json", str(tmp_path / "run.json")),
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    for found in record["speculation"]:
        for name in (
            "speculative_over_plain",
            "lookahead_over_without",
            "over_generate",
            "over_assisted_generation",
        ):
            assert found[name]["value"] > 0
        assert 0 <= found["alpha"] <= 1
        assert 0 <= found["hit_rate"] <= 1
    assert [(each["temperature"], each["concurrency"]) for each in record["service"]] == [
        (t, n) for t in (0, 1) for n in (1, 2)
    ]
    cells = {(c["arm"], c["temperature"], c["concurrency"]): c for c in record["cells"]}
    config = BenchConfig(device="cpu")
    chosen = automatic(config).name, served(config).name
    for arm in ("speculative, K=2", "lookahead, K=2", "tree of 6, K=2", *chosen):
        assert cells[arm, 0.0, 1]["counts"]["completion_tokens"] == 2 * 2 * 8
        assert cells[arm, 0.0, 1]["opening"]["completion_tokens"] == 2 * 2
        assert cells[arm, 0.0, 1]["opening"]["num_rounds"] == 2 * 2
    # Branches of a model this small seldom arrive before the verdict does; without lookahead none can.
    assert cells["speculative, K=2", 0.0, 1]["hit_rate"] == 0
    assert cells["speculative, K=2", 0.0, 1]["alpha"] > 0
    for n in (1, 2):
        tree = cells["tree of 6, K=2", 1.0, n]["counts"]
        assert tree["num_draft_tokens"] > 2 * tree["num_spec_steps"], "more than chains have"
    assert cells["plain", 1.0, 2]["counts"]["completion_tokens"] == 2 * 32 * 8
    peers = {name for name, _, _ in cells if name.startswith("transformers")}
    assert len(peers) == 3
    for (arm, _, _), cell in cells.items():
        assert {run["repeat"] for run in cell["runs"]} == ({0} if arm in peers else {0, 1})
    assert "Tokens/s of all, temperature 1" in done.stdout
