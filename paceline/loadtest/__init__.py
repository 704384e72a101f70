"""`paceline loadtest`: sends load to a running service and measures what its users see.

    config + prompts ─▶ plan ─▶ running ─▶ outcomes ─▶ summary, verifying ─▶ report (JSON) · table

All requests are planned in advance, identically for the same seed; results are summarised after the last
answer. Only `run` and `running` contact a server, through the SDK, which is the package's only dependency.
"""

from paceline.loadtest.config import LoadConfig
from paceline.loadtest.outcomes import RequestOutcome
from paceline.loadtest.prompts import PROMPTS, Prompts, read_prompts
from paceline.loadtest.report import Report
from paceline.loadtest.run import LoadTest
from paceline.loadtest.table import print_report

__all__ = [
    "PROMPTS",
    "LoadConfig",
    "LoadTest",
    "Prompts",
    "Report",
    "RequestOutcome",
    "print_report",
    "read_prompts",
]
