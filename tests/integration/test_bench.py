"""`paceline bench` through real processes, on a tiny random pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.bench.arms import automatic, served
from paceline.bench.config import BenchConfig
from paceline.bench.figures import RATIOS
from paceline.core.types import AcceptanceMode

HANG = 280.0  # seconds after which a test has failed


def test_one_short_run_has_every_ratio(tiny_pair: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "paceline", "bench", "--quick"),
            *("--target-model", str(tiny_pair.target), "--draft-model", str(tiny_pair.draft)),
            *("--device", "cpu", "--concurrency", "1", "--concurrency", "2", "--k", "2"),
            # A step is the difference of two times: of a model this small, too short ones to have a sign.
            *("--target-pass-seconds", "0.002"),
            *("--temperature", "0", "--temperature", "1", "--prompts", "2", "--max-tokens", "12"),
            *("--repeats", "2"),
            *("--json", str(tmp_path / "run.json"), "--plots", str(tmp_path / "plots")),
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert set(record["ratios"]) == set(RATIOS)
    assert all(value > 0 for value in record["ratios"].values()), record["ratios"]
    figures = record["figures_by_temperature"]["0"]
    assert 0 <= figures["alpha"] <= 1
    assert 0 <= figures["hit_rate"] <= 1
    assert figures["target_step_over_floor"] > 0
    cells = {(c["arm"], c["temperature"], c["concurrency"]): c for c in record["cells"]}
    config = BenchConfig(device="cpu", acceptance=(AcceptanceMode.COUPLED,))
    chosen = [automatic(config).name, served(config).name]
    for arm in ("speculative, coupled, K=2", "lookahead, coupled, K=2", *chosen):
        assert cells[arm, 0.0, 1]["counts"]["completion_tokens"] == 2 * 2 * 12
    # Branches of a model this small seldom arrive before the verdict does; without lookahead none can.
    assert cells["speculative, coupled, K=2", 0.0, 1]["hit_rate"] == 0
    assert cells["speculative, coupled, K=2", 0.0, 1]["acceptance_rate"] > 0
    assert cells["plain", 1.0, 2]["counts"]["completion_tokens"] == 2 * 32 * 12
    peers = {name for name, _, _ in cells if name.startswith("transformers")}
    assert len(peers) == 4
    for (arm, _, _), cell in cells.items():
        assert {run["repeat"] for run in cell["runs"]} == ({0} if arm in peers else {0, 1})
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "throughput.png",
        "ratios.png",
        "rounds.png",
    }
    assert "Requests at a time, temperature 1" in done.stdout
