"""`paceline measure` on a tiny random pair, with files that a user gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HANG = 280.0  # seconds after which a test has failed


def test_a_measurement_is_printed_written_and_drawn(tiny_pair: Any, tmp_path: Path) -> None:
    lines = [
        {"prompt": "abc abc abc", "kind": "again"},
        {"prompt": [1, 2, 3], "max_tokens": 9},
        {"prompt": "def main():", "kind": "code"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    models = ("--target-model", str(tiny_pair.target), "--draft-model", str(tiny_pair.draft))
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "paceline", "measure", *models),
            *("--draft-model", str(tiny_pair.target), "--drafter", "prompt-lookup"),
            *("--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "12", "--max-k", "5"),
            *("--temperature", "1", "--device", "cpu"),
            *("--json", str(tmp_path / "m.json"), "--plots", str(tmp_path / "plots")),
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Speed-ups are predictions" in done.stdout
    assert "temperature 1: text 3 of 3" in done.stderr
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    record = json.loads((tmp_path / "m.json").read_text())
    rows = {(row["kind"], row["drafter"]): row for row in record["rows"]}
    assert {kind for kind, _ in rows} == {"all", "again", "code"}
    itself = rows["all", str(tiny_pair.target)]
    assert itself["alpha"] > 0.999999
    assert itself["coupled"] > 0.999999
    assert itself["predictions"]["rejection"]["best_k"] in range(6)
    assert 0 < rows["all", str(tiny_pair.draft)]["alpha"] < 1
    assert rows["all", "prompt-lookup"]["alpha"] <= rows["all", "prompt-lookup"]["guessed"]
    assert all(cost["c"]["median"] > 0 for cost in record["costs"].values())
