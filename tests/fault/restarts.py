"""Streams over restarts of their coordinator, as often as wanted, counted as JSON on standard output:

python -m tests.fault.restarts --times 10 --streams 48
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "support"))

from harness.pair import find_pair
from harness.restarting import restart, undisturbed
from harness.stacks import running_stack


def main() -> int:
    """Print the counts of each signal; 1 if any stream was not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="restarts of each kind")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--late", type=int, default=16, help="streams that begin after the signal")
    parser.add_argument("--drain-timeout", type=float, default=0.5)
    options = parser.parse_args()
    report: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pair = find_pair(None, lambda: Path(folder))
        with running_stack(pair, drain_timeout=options.drain_timeout) as stack:
            asked = undisturbed(stack, options.streams)
            for number in (signal.SIGTERM, signal.SIGKILL):
                counts = report[number.name] = Counter(restarts=options.times)
                for _ in range(options.times):
                    stack.wait_until_ready()
                    counts.update(restart(stack, number, asked, options.late))
                    print(number.name, dict(counts), file=sys.stderr)
    print(json.dumps(report))
    return int(any(counts[bad] for counts in report.values() for bad in ("lost", "doubled", "different")))


if __name__ == "__main__":
    sys.exit(main())
