"""`paceline bench`: compares ways of decoding (arms) in one run, on the same prompts and checkpoints.

    config ─▶ arms ─▶ services + peer ─▶ measuring ─▶ cells ─▶ figures ─▶ table · record (JSON)

Arms alternate prompt by prompt, so that a slow phase of the machine affects all of them. Ratios are medians
over pairs of runs that did the same work.
"""

from paceline.bench.config import FULL, QUICK, BenchConfig
from paceline.bench.record import BenchRecord
from paceline.bench.run import run_bench
from paceline.bench.table import print_record

__all__ = ["FULL", "QUICK", "BenchConfig", "BenchRecord", "print_record", "run_bench"]
