"""Runs checks case by case: a failure, a time limit or a reason not to run costs one row."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.gpu_check.device import Device, release
from tools.gpu_check.report import Failed, Figures, Report, Row, Skipped, Status, line_of
from tools.gpu_check.sizes import Sizes

GRACE_SECONDS: Final = 20.0
"""Time beyond the overall limit after which the process ends although a case hangs in a library."""
_FRAMES: Final = 6
"""Places of an error that a row tells, the innermost ones."""
Case = tuple[str, Callable[[], Figures]]
"""A name, and what measures. It raises Failed, Skipped, or any error."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check works with."""

    device: Device
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Check:
    """A group of cases that share what they need, such as a model."""

    name: str
    about: str
    cases: Callable[[Bench], Iterator[Case]]
    """Yields cases, each of which runs before the next is asked for. What it holds is freed at its end."""
    minutes: float = 1.0
    """Time limit on a card."""


class TimeLimitError(BaseException):
    """A case took longer than its check may. Workers survive any Exception, and would survive this one."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the block after `seconds`; where nothing can interrupt it, at its end."""

    def ring(*_: Any) -> None:
        raise TimeLimitError(f"took more than {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Run:
    """One run of some checks: rows are printed and written as they come."""

    def __init__(self, report: Report, out: Path, minutes: float, stretch: float = 1.0) -> None:
        """`stretch` multiplies the limits of checks, for a slower machine."""
        self._report = report
        self._out = out
        self._begun = time.monotonic()
        self._end = self._begun + 60 * minutes
        self._stretch = stretch
        self._lock = threading.Lock()

    def run(self, checks: Sequence[Check], bench: Bench) -> None:
        """Run the checks in order."""
        watchdog = threading.Timer(self._end - self._begun + GRACE_SECONDS, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            for check in checks:
                self._run_check(check, bench)
            self._report.finished = True
        finally:
            watchdog.cancel()
            self._write()

    def _run_check(self, check: Check, bench: Bench) -> None:
        end = min(self._end, time.monotonic() + 60 * check.minutes * self._stretch)
        cases = check.cases(bench)
        try:
            while True:
                begun = time.monotonic()
                try:
                    with limited(end - begun):
                        case = next(cases, None)
                except (Exception, TimeLimitError) as error:
                    self._add(_row(check, "preparation", begun, error))
                    return
                if case is None:
                    return
                self._add(self._measured(check, case, end))
        finally:
            cases.close()  # type: ignore[attr-defined]
            release()

    def _measured(self, check: Check, case: Case, end: float) -> Row:
        name, measure = case
        begun = time.monotonic()
        if begun >= end:
            return Row(check.name, name, "skipped", 0.0, {}, "no time was left")
        try:
            with limited(end - begun):
                figures = measure()
        except (Exception, TimeLimitError) as error:
            return _row(check, name, begun, error)
        return Row(check.name, name, "ok", _since(begun), figures)

    def _add(self, row: Row) -> None:
        with self._lock:
            self._report.rows.append(row)
        print(line_of(row), flush=True)
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._report.seconds = time.monotonic() - self._begun
            self._report.write(self._out)

    def _give_up(self) -> None:
        """Leave a case that hangs: what is written stays."""
        print("error: a case hangs beyond the time limit", file=sys.stderr, flush=True)
        self._write()
        os._exit(3)


def _row(check: Check, name: str, begun: float, error: BaseException) -> Row:
    status: Status = "skipped" if isinstance(error, Skipped) else "failed"
    figures = error.figures if isinstance(error, Failed) else {}
    return Row(check.name, name, status, _since(begun), figures, _told(error))


def _told(error: BaseException) -> str:
    """The error in one line; behind it, for errors that nobody raised on purpose, where it came from."""
    if isinstance(error, Failed | Skipped):
        return str(error)
    first = str(error).splitlines()[0] if str(error) else ""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = (
        f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} in {frame.name}" for frame in frames
    )
    return "\n".join([f"{type(error).__name__}: {first}", *places])


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 2)
