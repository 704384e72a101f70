"""`paceline measure`: how well drafters predict a target on given prompts, and the speed-up to expect.

    config + prompts ─▶ models, drafters ─▶ measuring ─▶ figures ─▶ record (JSON) · table

The target samples each text. At every position, its distribution p is compared with each drafter's q.
`paceline.decoding.agreement` and `theory` have the mathematics.
"""

from paceline.measure.config import MeasureConfig
from paceline.measure.record import MeasureRecord
from paceline.measure.run import run_measure
from paceline.measure.table import print_measures

__all__ = ["MeasureConfig", "MeasureRecord", "print_measures", "run_measure"]
