"""`paceline loadtest`: load on a service that runs, and what its users would have seen.

    config + prompts ─▶ plan ─▶ running ─▶ outcomes ─▶ summary, verifying ─▶ report (JSON) · table

What is sent when is planned before anything is sent, and the same for the same seed; what came back is
summed up after the last answer. Only `run` and `running` talk to a server, through the SDK, and nothing here
needs more than it.
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
