"""Process settings of commands run in this process are undone after each test."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers, hooks = root.level, root.handlers[:], (sys.excepthook, threading.excepthook)
    yield
    if root.level != level or root.handlers != handlers:
        root.setLevel(level)
        root.handlers[:] = handlers
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(False)
