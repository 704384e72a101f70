"""The report of a load test, as a value and as JSON (format: docs/load-testing.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.client.results import to_plain
from paceline.client.server_status import Model
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.loadtest.config import LoadConfig
from paceline.loadtest.outcomes import RequestOutcome
from paceline.loadtest.summary import Summary, summary
from paceline.loadtest.verifying import VerifyReport

FORMAT = 2
BUSY = 0.8
"""Share of a core above which the load tester itself may be the bottleneck."""
_MOST_MESSAGES = 5


@dataclass(frozen=True)
class Report:
    """Settings and results of a load test."""

    address: str
    model: Model
    config: LoadConfig
    sampling: SamplingParams
    speculation: SpeculationParams
    begun: datetime
    outcomes: Sequence[RequestOutcome]
    unsent: int
    """Requests that were due but still waited for a slot when the test ended."""
    stopped: bool
    """The test was stopped early."""
    seconds: float
    """From the start to the end of the last request; at least the duration if that ended an open loop."""
    client_cpu: float
    """This process's CPU time over the time to the end of the last request."""
    verification: VerifyReport | None

    @cached_property
    def summary(self) -> Summary:
        """The figures."""
        return summary(self.outcomes, self.seconds, self.config.goals, self.unsent)

    @property
    def sound(self) -> bool:
        """True if every request finished and every verified answer is equal."""
        return not self.summary.failed and (self.verification is None or self.verification.sound)

    @property
    def notes(self) -> list[str]:
        """Remarks needed to interpret the figures."""
        notes = []
        if self.client_cpu > BUSY:
            notes.append(
                f"the load tester kept {self.client_cpu:.0%} of a core busy: it may be the bottleneck; "
                "run several testers in parallel to send more"
            )
        if self.stopped:
            notes.append("stopped early")
        if self.summary.failed:
            notes.append("latencies and rates cover finished requests only")
        checked = self.verification
        failures = [failure for outcome in self.outcomes if (failure := outcome.failure)]
        messages = list(dict.fromkeys([*failures, *(checked.failures if checked else ())]))
        notes += messages[:_MOST_MESSAGES]
        if len(messages) > _MOST_MESSAGES:
            notes.append(f"and {len(messages) - _MOST_MESSAGES} other error messages")
        if checked and checked.differences:
            d = checked.differences[0]
            notes.append(
                f"request {d.number} differs from token {d.index} on; near-ties may differ unless the "
                "service is --deterministic (README, Guarantees)"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return {
            "format": FORMAT,
            "version": version("paceline"),
            "begun": self.begun.isoformat(timespec="seconds"),
            "stopped": self.stopped,
            "address": self.address,
            "model": to_plain(self.model),
            "settings": to_plain(self.config)
            | {"requests": self.config.most_requests, "concurrency": self.config.places},
            "sampling": to_plain(self.sampling),
            "speculation": to_plain(self.speculation),
            "summary": to_plain(self.summary),
            "verification": to_plain(self.verification),
            "client_cpu": self.client_cpu,
            "notes": self.notes,
            "requests": [outcome.to_dict() for outcome in self.outcomes],
        }

    def write(self, file: Path) -> None:
        """Write the report as JSON. Raises OSError."""
        file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
